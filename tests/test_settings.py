"""Options: how they are read, and what a person is told who gets one wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fusecomp.errors import OptionError
from fusecomp.settings import Options, cache_dir, environment

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment():
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_safe() -> None:
    assert Options.parse() == Options(verify=True, strict=False, lowering="auto", tune=0, inner="inductor")


@pytest.mark.parametrize("spelling", [False, 0, "false", "False", "0", "no", "off"])
def test_false_has_spellings(spelling: object) -> None:
    assert Options.parse({"verify": spelling}).verify is False


@pytest.mark.parametrize("spelling", [True, 1, "true", "True", "1", "yes", "on"])
def test_true_has_spellings(spelling: object) -> None:
    assert Options.parse({"strict": spelling}).strict is True


def test_numbers_may_be_text() -> None:
    assert Options.parse({"tune": "3"}).tune == 3


def test_mode_comes_from_torch_compile_or_from_the_options() -> None:
    assert Options.parse(None, mode="reduce-overhead").mode == "reduce-overhead"
    assert Options.parse({"mode": "max-autotune"}, mode="default").mode == "max-autotune"


def test_the_inner_backend_may_be_any_that_torch_knows() -> None:
    assert Options.parse({"inner": "aot_eager"}).inner == "aot_eager"


WRONG = {
    "unknown option 'verfy' (did you mean 'verify'?). Options are: verify, strict,": {"verfy": True},
    "unknown option 'max_autotune'": {"max_autotune": True},
    "option 'verify' takes true or false; got 2": {"verify": 2},
    "option 'strict' takes true or false; got 'maybe'": {"strict": "maybe"},
    "option 'tune' takes a number of tiles to time, 0 or more; got -1": {"tune": -1},
    "option 'tune' takes a number of tiles to time, 0 or more; got True": {"tune": True},
    "takes one of auto, triton, cpu, off (did you mean 'triton'?); got 'trition'": {"lowering": "trition"},
    "such as inductor, aot_eager or eager (did you mean 'aot_eager'?); got 'aot_eagr'": {"inner": "aot_eagr"},
    "takes another backend than fusecomp itself": {"inner": "fusecomp"},
    "option 'mode' takes one of default,": {"mode": "fast"},
    "option 'empty_rows' takes one of nan, zero; got None": {"empty_rows": None},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_say_what_is_accepted(message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(WRONG[message])
    assert message in str(caught.value)


def test_an_option_outranks_the_environment_which_outranks_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_VERIFY", "0")
    assert Options.parse().verify is False
    assert Options.parse({"verify": True}).verify is True


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_STRICT", "perhaps")
    with pytest.raises(OptionError, match="variable FUSECOMP_STRICT takes true or false; got 'perhaps'"):
        Options.parse()


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_LOWERING", "")
    assert Options.parse().lowering == "auto"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == Path.home() / ".cache" / "fusecomp"
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path


def test_few_variables() -> None:
    assert len(environment()) <= 6


@pytest.mark.parametrize("name", [*(f.name for f in fields(Options)), *environment()])
def test_the_readme_documents_each_option_and_variable(name: str) -> None:
    assert f"`{name}`" in README.read_text()
