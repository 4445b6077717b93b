"""The scripted engine on a given address, as an engine's command in a job starts it: HOST PORT SCRIPT.

It listens on 127.0.0.1 itself; connections to HOST:PORT are forwarded there.
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from rollyard.testing.script import FolderTokenizer, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir


async def main(host: str, port: int, script: Path) -> None:
    tokenizer = FolderTokenizer(tokenizer_dir())
    root = str(tokenizer_dir())
    async with ScriptedEngine(Rules.load(script), tokenizer=tokenizer, root=root, latency_s=0.2) as engine:
        inner = int(engine.url.rpartition(":")[2])

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(65_536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", inner)
            await asyncio.gather(carry(reader, engine_writer), carry(engine_reader, writer))

        async with await asyncio.start_server(serve, host, port) as server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
