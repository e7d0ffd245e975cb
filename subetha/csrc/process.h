/* What the core needs of the kernel, callable without the GIL: futex, locks that prove life, fork, one timer thread a process.
 *
 * A registration is a byte-range lock (OFD) on one byte, through an open file description of its own that is used for
 * nothing else. While it is held its holder lives; the kernel drops it at death. The fork handler closes inherited
 * descriptions in the child without unlocking them, so a child neither keeps its parent alive nor frees its byte.
 */
#ifndef SUBETHA_PROCESS_H
#define SUBETHA_PROCESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"

#define TIMER_PERIOD_NS 500000000LL
#define ORPHAN_NS 3500000000LL

typedef struct registration {
    struct registration *next;
    uint64_t *status;             /* the record's word; beats stop when it is not `expected_status` any more */
    uint64_t expected_status;
    uint64_t *last_seen;
    const uint64_t *epoch;
    int64_t byte;                 /* offset of the locked byte */
    int lock_fd;                  /* the description that holds the lock; -1: none */
    int probe_fd;                 /* another description of the same file, for tests */
    int auto_beat;
    int (*look)(void *);          /* called by the timer; gives the ms until it wants to be called again, or 0 */
    void *look_at;
    int64_t lost;                 /* 1: the lock is gone although nobody gave it up */
    int64_t unlinked;             /* 1: the file has no name any more, so nobody will come to it again */
    int64_t inherited;            /* 1: made by the process that forked this one */
} registration;

static int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Part of a file as it is now, in a mapping of this process alone: later changes of the file show in it, until keep_private. */
static void *map_private(int fd, int64_t offset, size_t length)
{
    void *at = mmap(NULL, length, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, offset);
    return at == MAP_FAILED ? NULL : at;
}

/* From here on nothing that happens to the file shows in it: each page is written to, and is a copy by that. */
static int keep_private(void *at, size_t length)
{
    volatile unsigned char *byte = at;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (mprotect(at, length, PROT_READ | PROT_WRITE) != 0)
        return -1;
    for (size_t n = 0; n < length; n += page)
        byte[n] = byte[n];
    return mprotect(at, length, PROT_READ);
}

static int64_t realtime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* ---- futex: shared, across processes ---- */

/* Sleeps until woken, `ns` have passed or a signal came; not at all where the word is not `value` any more. */
static void futex_wait_u32(uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec limit = {ns / 1000000000LL, ns % 1000000000LL};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static int futex_wake_u32(uint32_t *word, int most)
{
    return (int)syscall(SYS_futex, word, FUTEX_WAKE, most, NULL, NULL, 0);
}

/* ---- the disk ---- */

/* Returns when the mapped bytes are on the disk: 0, or errno. */
static int sync_bytes(const void *from, uint64_t length)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = (uintptr_t)from / page * page;
    return msync((void *)start, (uintptr_t)from + length - start, MS_SYNC) == 0 ? 0 : errno;
}

/* ---- locks ---- */

static int lock_test(int fd, int64_t byte) /* 1: somebody holds it; 0: nobody; -1: errno */
{
    struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    if (fcntl(fd, F_OFD_GETLK, &probe) != 0)
        return -1;
    return probe.l_type != F_UNLCK;
}

/* A description of its own for the file behind `fd`, with a write lock on `byte`. -1: errno (EAGAIN: somebody holds it). */
static int lock_take(int fd, int64_t byte)
{
    char path[40];
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, O_RDWR | O_CLOEXEC);
    if (own < 0)
        return -1;
    if (fcntl(own, F_OFD_SETLK, &lock) != 0) {
        int why = errno == EACCES ? EAGAIN : errno;
        close(own);
        errno = why;
        return -1;
    }
    return own;
}

static int file_is_unlinked(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 && found.st_nlink == 0;
}

/* ---- the process: registrations, fork, timer ---- */

static pthread_mutex_t process_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t process_changed;
static registration *process_registrations;
static int timer_is_running;
static int process_is_set_up;
static int64_t fork_count;
static pid_t watched_parent;      /* 0: nobody; only the timer and the one call that sets it look at these two */
static int64_t orphan_since_ns;

static int64_t fork_generation(void) { return private_get(&fork_count); }

/* May the holder go on? */
static int registration_is_good(registration *r) { return !private_get(&r->lost) && !private_get(&r->unlinked); }

static void before_fork(void) { pthread_mutex_lock(&process_mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&process_mutex); }

static void init_condition(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&process_changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void after_fork_in_child(void)
{
    registration *r = process_registrations;
    while (r) {
        registration *next = r->next;
        if (r->lock_fd >= 0)
            close(r->lock_fd);
        r->lock_fd = -1;
        private_set(&r->inherited, 1);
        r->next = NULL;
        r = next;
    }
    process_registrations = NULL;
    timer_is_running = 0;
    watched_parent = 0;
    private_set(&fork_count, fork_count + 1);
    pthread_mutex_init(&process_mutex, NULL);
    init_condition();
}

/* From here on this process ends soon after `pid`, its parent: SIGTERM asks it to, SIGKILL does it where it is stuck. */
static void watch_parent(int pid)
{
    pthread_mutex_lock(&process_mutex);
    orphan_since_ns = 0;
    watched_parent = pid;
    pthread_mutex_unlock(&process_mutex);
}

static void end_orphan(void)
{
    if (!watched_parent || getppid() == watched_parent)
        return;
    if (!orphan_since_ns) {
        orphan_since_ns = monotonic_ns();
        kill(getpid(), SIGTERM);
    } else if (monotonic_ns() - orphan_since_ns > ORPHAN_NS)
        kill(getpid(), SIGKILL);
}

static int timer_tick(void) /* ms until somebody wants the next tick, or 0 */
{
    int soonest = 0;
    end_orphan();
    for (registration *r = process_registrations; r; r = r->next) {
        if (!r->status)
            continue;
        /* also where the probe cannot tell: whoever closed that descriptor has closed the other one as well */
        if (lock_test(r->probe_fd, r->byte) != 1)
            private_set(&r->lost, 1);
        else if (file_is_unlinked(r->probe_fd))
            private_set(&r->unlinked, 1);
        /* T1: pairs with T2 in the snapshot of a record */
        if (r->auto_beat && load_acquire_u64(r->status) == r->expected_status)
            store_release_u64(r->last_seen, load_acquire_u64(r->epoch));
    }
    for (registration *r = process_registrations; r; r = r->next) {
        int ms = r->look && registration_is_good(r) ? r->look(r->look_at) : 0;
        if (ms && (!soonest || ms < soonest))
            soonest = ms;
    }
    return soonest;
}

static void *timer_main(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&process_mutex);
    while (process_registrations) {
        int ms = timer_tick();
        int64_t until = monotonic_ns() + (ms ? ms * 1000000LL : TIMER_PERIOD_NS);
        struct timespec limit = {until / 1000000000LL, until % 1000000000LL};
        pthread_cond_timedwait(&process_changed, &process_mutex, &limit);
    }
    timer_is_running = 0;
    pthread_mutex_unlock(&process_mutex);
    return NULL;
}

static int start_timer(void) /* with the mutex held */
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (timer_is_running)
        return 0;
    /* no signal may land on the timer: Python's handlers need the main thread to be interrupted */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 128 * 1024);
    int why = pthread_create(&thread, &attributes, timer_main, NULL);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (why == 0) {
        timer_is_running = 1;
        pthread_setname_np(thread, "subetha-timer");
    }
    return why;
}

static int set_up_process(void) /* with the mutex held; 0, or errno */
{
    int why = 0;
    if (!process_is_set_up) {
        init_condition();
        why = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        process_is_set_up = why == 0;
    }
    return why;
}

/* From here on fork_generation() moves on in a forked child, also without a registration. 0, or errno. */
static int count_forks(void)
{
    pthread_mutex_lock(&process_mutex);
    int why = set_up_process();
    pthread_mutex_unlock(&process_mutex);
    return why;
}

/* Lock the byte and make the registration known to the fork handler. 0, or errno (EAGAIN: the byte is held). */
static int registration_lock(registration *r, int fd, int64_t byte)
{
    pthread_mutex_lock(&process_mutex);
    int why = set_up_process();
    if (why == 0) {
        r->status = NULL;
        r->byte = byte;
        r->probe_fd = fd;
        r->look = NULL;
        r->lost = r->unlinked = r->inherited = 0;
        r->lock_fd = lock_take(fd, byte);
        why = r->lock_fd < 0 ? errno : 0;
    }
    if (why == 0) {
        r->next = process_registrations;
        process_registrations = r;
    }
    pthread_mutex_unlock(&process_mutex);
    return why;
}

/* From here on the timer watches the lock and, if asked to, beats. */
static int registration_watch(registration *r, uint64_t *status, uint64_t expected, uint64_t *last_seen, const uint64_t *epoch,
                              int auto_beat)
{
    pthread_mutex_lock(&process_mutex);
    r->expected_status = expected;
    r->last_seen = last_seen;
    r->epoch = epoch;
    r->auto_beat = auto_beat;
    r->status = status;
    int why = start_timer();
    pthread_mutex_unlock(&process_mutex);
    return why;
}

/* From here on (look: NULL, until here) the timer calls look(at) at every tick, and at once. */
static void registration_look(registration *r, int (*look)(void *), void *at)
{
    pthread_mutex_lock(&process_mutex);
    r->look = look;
    r->look_at = at;
    if (look)
        pthread_cond_signal(&process_changed);
    pthread_mutex_unlock(&process_mutex);
}

/* Forget the registration and let the lock go. The timer ends with the last one. */
static void registration_end(registration *r)
{
    pthread_mutex_lock(&process_mutex);
    for (registration **at = &process_registrations; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    /* a lost description was closed by somebody else, and its number may be another file's by now */
    if (r->lock_fd >= 0 && !private_get(&r->lost))
        close(r->lock_fd);
    r->lock_fd = -1;
    if (!process_registrations)
        pthread_cond_signal(&process_changed);
    pthread_mutex_unlock(&process_mutex);
}

#endif
