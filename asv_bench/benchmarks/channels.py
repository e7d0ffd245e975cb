"""Ways for bytes from one process to another, with the same calls: Subetha's ring and its peers.

Each has loops of its own for many messages, so that no call is measured that its users would not make.
"""

import multiprocessing
import os
from itertools import repeat

from subetha import SharedRing

from .peers import needed, subetha_ipc

CAPACITY = 4096
BATCH = 256


class Channel:
    """One end, or both. `put` and `take` wait; batches are lists of `BATCH` messages.

    Parameters
    ----------
    folder : Folder
        For files.
    name : str
        Of one of several in that folder.
    payload : bytes
        What messages look like.
    """

    has_batches = True
    address = None
    """Opens the other end in another process, by `receiver` or `sender`; goes there as an argument of the process."""

    def in_one_thread(self):
        """Let this thread use both ends."""

    def here_sends(self):
        """Let this process put, and another one take."""

    def here_receives(self):
        """Let this process take, and another one put."""

    def there_is_open(self):
        """The process that has the other end has started."""

    def pairs(self, payload, count):
        """Put one in and take it out, `count` times, in this thread."""
        put, take = self.put, self.take
        for _ in repeat(None, count):
            put(payload)
            take()

    def send(self, payload, count):
        put = self.put
        for _ in repeat(None, count):
            put(payload)

    def receive(self, count):
        take = self.take
        for _ in repeat(None, count):
            take()

    def send_batches(self, payload, count):
        put, batch = self.put_batch, [payload] * BATCH
        for _ in range(count // BATCH):
            put(batch)

    def receive_batches(self, count):
        take = self.take_batch
        for _ in range(count // BATCH):
            take()

    def close(self):
        pass


class Subetha(Channel):
    def __init__(self, folder, name, payload):
        self._use(SharedRing.create(folder.file(name), CAPACITY, payload_bytes=max(8, len(payload))))

    @classmethod
    def receiver(cls, address):
        channel = cls.__new__(cls)
        channel._use(SharedRing.open(address))
        return channel

    sender = receiver

    def _use(self, ring):
        self.ring, self.address = ring, ring.path
        self.put, self.take = ring.push, ring.pop

    def pairs(self, payload, count):
        push, pop = self.ring.try_push, self.ring.try_pop
        for _ in repeat(None, count):
            push(payload)
            pop()

    def send_batches(self, payload, count):
        push, push_many, batch = self.ring.push, self.ring.push_many, [payload] * BATCH
        for _ in range(count // BATCH):
            done = push_many(batch)
            while done < BATCH:
                push(payload)
                done += 1 + push_many(batch[done + 1 :])

    def receive_batches(self, count):
        pop, pop_many, got = self.ring.pop, self.ring.pop_many, 0
        while got < count:
            here = len(pop_many(BATCH))
            if not here:
                pop()
                here = 1
            got += here

    def close(self):
        self.ring.close()


class _Polled(Channel):
    """`_put` and `_take` do not wait; a thread that finds nothing lets others run."""

    def put(self, payload):
        put = self._put
        while not put(payload):
            os.sched_yield()

    def take(self):
        take = self._take
        while (payload := take()) is None:
            os.sched_yield()
        return payload

    def pairs(self, payload, count):
        put, take = self._put, self._take
        for _ in repeat(None, count):
            put(payload)
            take()

    def send(self, payload, count):
        put, rest = self._put, os.sched_yield
        for _ in repeat(None, count):
            while not put(payload):
                rest()

    def receive(self, count):
        take, rest = self._take, os.sched_yield
        for _ in repeat(None, count):
            while take() is None:
                rest()

    def send_batches(self, payload, count):
        put, batch = self._put_many, [payload] * BATCH
        for _ in range(count // BATCH):
            done = put(batch)
            while done < BATCH:
                os.sched_yield()
                done += put(batch[done:])

    def receive_batches(self, count):
        take, got = self._take_many, 0
        while got < count:
            here = len(take(BATCH))
            if not here:
                os.sched_yield()
            got += here


class IpcRing(_Polled):
    """The adaptive ring of subetha-ipc, with one producer and one consumer."""

    def __init__(self, folder, name, payload):
        self.address = folder.file(name)
        self.ring = subetha_ipc().Ring(self.address, CAPACITY)

    def in_one_thread(self):
        self.here_sends()
        self.here_receives()

    def here_sends(self):
        ring, number = self.ring, self.ring.register_producer()
        self._put = lambda payload: ring.send(number, payload)
        self._put_many = lambda batch: ring.send_many(number, batch)

    def here_receives(self):
        ring, number = self.ring, self.ring.register_consumer()
        self._take = lambda: ring.recv(number)
        self._take_many = lambda n: ring.recv_many(number, n)

    @classmethod
    def _opened(cls, address):
        channel = cls.__new__(cls)
        channel.ring = subetha_ipc().Ring.open(address, CAPACITY)
        return channel

    @classmethod
    def receiver(cls, address):
        channel = cls._opened(address)
        channel.here_receives()
        return channel

    @classmethod
    def sender(cls, address):
        channel = cls._opened(address)
        channel.here_sends()
        return channel

    def pairs(self, payload, count):
        send, recv = self.ring.send, self.ring.recv
        for _ in repeat(None, count):
            send(0, payload)
            recv(0)


class IpcSpscRing(_Polled):
    """The ring of subetha-ipc for one producer and one consumer."""

    def __init__(self, folder, name, payload):
        self.address = folder.file(name)
        self._use(subetha_ipc().SpscRing(self.address, CAPACITY))

    @classmethod
    def receiver(cls, address):
        channel = cls.__new__(cls)
        channel._use(subetha_ipc().SpscRing.open(address, CAPACITY))
        return channel

    sender = receiver

    def _use(self, ring):
        self.ring = ring
        self._put, self._take, self._put_many, self._take_many = ring.push, ring.pop, ring.push_many, ring.pop_many


class ZeroQ(Channel):
    has_batches = False

    def __init__(self, folder, name, payload):
        # a name in /dev/shm, and not a path
        self.address = f"{os.path.basename(folder.path)}-{name}"
        self._use(needed("zeroq").Queue(self.address, len(payload), CAPACITY, create=True))

    @classmethod
    def receiver(cls, address):
        channel = cls.__new__(cls)
        channel._use(needed("zeroq").Queue(address, create=False))
        return channel

    sender = receiver

    def _use(self, queue):
        self.queue = queue
        self.put, self.take = queue.put, queue.get

    def pairs(self, payload, count):
        put, get = self.queue.put_nowait, self.queue.get_nowait
        for _ in repeat(None, count):
            put(payload)
            get()

    def close(self):
        self.queue.close()


class ZeroMQ(Channel):
    """PUSH and PULL over a socket of the file system, in one thread over `inproc`; a batch is one message of many parts."""

    def __init__(self, folder, name, payload):
        zmq = needed("zmq")
        self._made = [zmq.Context()]
        self.address = f"ipc://{folder.file(name)}"

    def _socket(self, kind, address, way):
        zmq = needed("zmq")
        socket = self._made[0].socket(getattr(zmq, kind))
        # messages that are under way at the end are nobody's
        socket.linger = 0
        socket.set_hwm(CAPACITY)
        getattr(socket, way)(address)
        self._made.append(socket)
        return socket

    def _put_to(self, socket):
        self.put, self.put_batch = socket.send, socket.send_multipart

    def _take_from(self, socket):
        self.take, self.take_batch = socket.recv, socket.recv_multipart

    def here_sends(self):
        self._put_to(self._socket("PUSH", self.address, "bind"))

    def here_receives(self):
        self._take_from(self._socket("PULL", self.address, "bind"))

    def in_one_thread(self):
        self._put_to(self._socket("PUSH", "inproc://pairs", "bind"))
        self._take_from(self._socket("PULL", "inproc://pairs", "connect"))

    @classmethod
    def _opened(cls, address):
        channel = cls.__new__(cls)
        channel._made, channel.address = [needed("zmq").Context()], address
        return channel

    @classmethod
    def receiver(cls, address):
        channel = cls._opened(address)
        channel._take_from(channel._socket("PULL", address, "connect"))
        return channel

    @classmethod
    def sender(cls, address):
        channel = cls._opened(address)
        channel._put_to(channel._socket("PUSH", address, "connect"))
        return channel

    def close(self):
        context, *sockets = self._made
        for socket in sockets:
            socket.close()
        context.term()


class Pipe(Channel):
    """`multiprocessing.Pipe`; a batch is a pickled list."""

    def __init__(self, folder, name, payload):
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self.put, self.take = self._writer.send_bytes, self._reader.recv_bytes
        self.put_batch, self.take_batch = self._writer.send, self._reader.recv

    def here_sends(self):
        self.address = self._reader

    def here_receives(self):
        self.address = self._writer

    @classmethod
    def receiver(cls, address):
        channel = cls.__new__(cls)
        channel._reader = channel._writer = address
        channel.take, channel.take_batch = address.recv_bytes, address.recv
        return channel

    @classmethod
    def sender(cls, address):
        channel = cls.__new__(cls)
        channel._reader = channel._writer = address
        channel.put, channel.put_batch = address.send_bytes, address.send
        return channel

    def there_is_open(self):
        # The end of the other process is its own, so that its death ends a wait for it.
        self.address.close()

    def close(self):
        self._reader.close()
        self._writer.close()


class Queue(Channel):
    """`multiprocessing.Queue`; a batch is a list."""

    def __init__(self, folder, name, payload):
        self._use(multiprocessing.get_context("forkserver").Queue())

    @classmethod
    def receiver(cls, address):
        channel = cls.__new__(cls)
        channel._use(address)
        return channel

    sender = receiver

    def _use(self, queue):
        self.address = queue
        self.put = self.put_batch = queue.put
        self.take = self.take_batch = queue.get

    def close(self):
        self.address.close()


class Iceoryx(_Polled):
    """Publisher and subscriber of iceoryx2, messages of 4 bytes; nobody waits, both ends poll."""

    has_batches = False

    def __init__(self, folder, name, payload):
        if len(payload) != 4:
            raise NotImplementedError("iceoryx2 sends structures of ctypes; only those of 4 bytes are measured")
        needed("iceoryx2")
        self.address = f"{os.path.basename(folder.path)}/{name}"

    def _service(self):
        import ctypes

        iceoryx2 = needed("iceoryx2")
        iceoryx2.set_log_level_from_env_or(iceoryx2.LogLevel.Error)
        # the node has to live as long as its ports
        self._node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        named = self._node.service_builder(iceoryx2.ServiceName.new(self.address))
        self._message = ctypes.c_uint32
        return named.publish_subscribe(ctypes.c_uint32).open_or_create()

    def here_sends(self):
        publisher, message = self._service().publisher_builder().create(), self._message

        def put(payload):
            publisher.send_copy(message.from_buffer_copy(payload))
            return True

        self._put = put

    def here_receives(self):
        subscriber = self._service().subscriber_builder().create()

        def take():
            sample = subscriber.receive()
            return None if sample is None else bytes(sample.payload().contents)

        self._take = take

    @classmethod
    def _opened(cls, address):
        channel = cls.__new__(cls)
        channel.address = address
        return channel

    @classmethod
    def receiver(cls, address):
        channel = cls._opened(address)
        channel.here_receives()
        return channel

    @classmethod
    def sender(cls, address):
        channel = cls._opened(address)
        channel.here_sends()
        return channel


KINDS = {
    "subetha": Subetha,
    "subetha-ipc Ring": IpcRing,
    "subetha-ipc SpscRing": IpcSpscRing,
    "zeroq": ZeroQ,
    "pyzmq": ZeroMQ,
    "iceoryx2": Iceoryx,
    "multiprocessing.Pipe": Pipe,
    "multiprocessing.Queue": Queue,
}
