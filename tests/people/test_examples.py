"""The programs in examples/ do what they say."""

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 90


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def test_text_statistics(tmp_path):
    (tmp_path / "one.py").write_text("spam spam eggs")
    (tmp_path / "two.py").write_text("spam, and no more")
    assert run("text_statistics.py", tmp_path).splitlines()[:2] == [
        "2 files, 6 words, 4 different ones",
        "       3 spam",
    ]


@pytest.mark.parametrize("mib", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_array_reduction(mib):
    said = run("array_reduction.py", str(mib))
    size, mean, deviation = re.fullmatch(r"(\d+) numbers: mean (.*), standard deviation (.*)\n", said).groups()
    assert int(size) == mib * 2**17
    assert (float(mean), float(deviation)) == (pytest.approx(5, abs=0.02), pytest.approx(2, abs=0.02))


def test_web_handler():
    server = subprocess.Popen([sys.executable, EXAMPLES / "web_handler.py"], stdout=subprocess.PIPE, text=True)
    with server:
        try:
            url = server.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                assert answer.read() == b"2 * 2 * 2 * 3 * 3 * 5\n"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url.replace("factors", "nothing"), timeout=WAIT_S)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.stdout.read() == "ended\n"
        assert server.wait(WAIT_S) == 0
