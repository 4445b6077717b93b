"""The proxy that the gateway is compared with: it forwards bytes without parsing them. Prints its `url`."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
import uvloop
from aiohttp import web


async def main(engine_url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def passed(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with http.post(
                engine_url + request.path, data=body, headers={"Content-Type": "application/json"}
            ) as got:
                if got.content_length is not None:
                    return web.Response(body=await got.read(), status=got.status, content_type="application/json")
                answer = web.StreamResponse(status=got.status, headers={"Content-Type": "text/event-stream"})
                await answer.prepare(request)
                async for chunk in got.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer

        runner = web.ServerRunner(web.Server(passed, access_log=None))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
