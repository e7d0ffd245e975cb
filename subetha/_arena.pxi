# Where the blocks of an arena lie (algorithms: _blocks.pxd): in a queue's file of their own, or at the end of a map's file.


cdef tuple arena_sizes(object limit, object begin):
    """Of an arena whose lines begin at `begin`, per size class the number of blocks, the offset of their words and that of their
    data; the words' end and the file's."""
    counts = []
    while len(counts) < MAX_CLASSES and layout.MIN_BLOCK_BYTES << len(counts) <= limit:
        counts.append(limit // (layout.MIN_BLOCK_BYTES << len(counts)))
    words = layout.align(begin + layout.ARENA_LINES.itemsize, layout.HOT_LINE)
    word_offsets, data_offsets = [], []
    for count in counts:
        word_offsets.append(words)
        words = layout.align(words + 8 * count, layout.HOT_LINE)
    data = words_end = layout.align(words, layout.MIN_BLOCK_BYTES)
    for size_class, count in enumerate(counts):
        data_offsets.append(data)
        data += count * (layout.MIN_BLOCK_BYTES << size_class)
    return counts, word_offsets, data_offsets, words_end, data


cdef int arena_attach(Arena *arena, uint8_t *base, object limit, object begin) except -1:
    """Point into the mapping `base` of the file whose descriptor `arena.fd` is."""
    counts, words, data, _, _ = arena_sizes(limit, begin)
    arena.base = base
    arena.limit = limit
    arena.lines = <ArenaLines *> (base + <uint64_t> begin)
    arena.classes = len(counts)
    for c in range(len(counts)):
        arena.counts[<int> c] = counts[c]
        arena.words[<int> c] = <uint64_t *> (base + <uint64_t> words[c])
        arena.data[<int> c] = data[c]
    return 0
