"""A web server in one event loop, whose requests are computed in worker processes.

    python examples/web_handler.py [PORT]

    curl http://127.0.0.1:PORT/factors/1000000016000000063

With PORT 0, the default, the system chooses one; it is printed. The loop answers other requests while workers compute.
"""

import asyncio
import sys
from functools import partial

import subetha


def factors(number: int) -> list[int]:
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found


async def answer(executor: subetha.Executor, path: str) -> tuple[str, str]:
    kind, _, argument = path.lstrip("/").partition("/")
    if kind != "factors" or not argument.isdigit():
        return "404 Not Found", "ask for /factors/NUMBER"
    return "200 OK", " * ".join(map(str, await executor.asubmit(factors, int(argument))))


async def serve(executor: subetha.Executor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = (await reader.readline()).split()
    while (await reader.readline()).strip():
        pass
    status, text = await answer(executor, request[1].decode()) if len(request) > 1 else ("400 Bad Request", "no path")
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text) + 1}\r\nConnection: close\r\n\r\n{text}\n".encode())
    await writer.drain()
    writer.close()


async def main() -> None:
    with subetha.Executor() as executor:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        server = await asyncio.start_server(partial(serve, executor), "127.0.0.1", port)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/factors/360", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("ended")
