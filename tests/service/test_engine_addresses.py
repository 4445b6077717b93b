"""An engine's address and key are checked when it is added: invalid ones are 422, not an internal error."""

from pathlib import Path

import pytest

from tests.service.site import open_site

BAD = (
    *("http://127.0.0.1:99999", "http://127.0.0.1:0", "http://127.0.0.1:x", "http://[::1", "http://[::1]x:80"),
    *("http://a b", "http://host\r\nX-Evil: 1", "http://host\x00", "http://" + "a" * 64 + ".example"),
    *("http://a..b", "http://" + "a." * 130 + "b", "http://@", "http://:80", "ftp://host", "http://", ""),
)


async def test_invalid_engine_addresses_are_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for url in BAD:
            answer = await site.post("/v1/engines", {"url": url, "id": "e"})
            assert (answer.status, answer.code) == (422, "invalid_request"), (url, answer.body)
        assert (await site.get("/v1/engines")).body["engines"] == []


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x7f", "\u20ac"])
async def test_an_api_key_that_cannot_be_sent_in_a_header_is_refused(tmp_path: Path, key: str) -> None:
    async with open_site(tmp_path) as site:
        answer = await site.post("/v1/engines", {"url": "http://127.0.0.1:9", "api_key": key})
        assert (answer.status, answer.code) == (422, "invalid_request"), answer.body


async def test_an_unreachable_engine_is_reported_as_unavailable(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        answer = await site.post("/v1/engines", {"url": "http://127.0.0.1:9"})
        assert answer.code == "engine_unavailable"
