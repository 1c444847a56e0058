"""Events of a stream are lines; whatever a model says stays in one."""

from __future__ import annotations

import json

import pytest

from inference.server.generation.chunks import quote
from inference.server.http.responses import dumps


@pytest.mark.parametrize("encode", [quote, dumps])
def test_no_text_breaks_a_line(encode):
    text = "".join(map(chr, range(0x100))) + "\u2028\u2029\u6f22"
    line = encode(text)
    assert line.splitlines() == [line]
    assert json.loads(line) == text
