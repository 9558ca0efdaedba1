"""Environments: found by name, and answers that become tokens without touching what the model wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from moesaic.rl.environment import Step, encode_observation, load_environment
from moesaic.rl.types import Prompt
from moesaic.rl.user_code import import_file, load_callable
from tests.unit.data_tokenizers import CHATML, SPACED, THINKING, build_tokenizer

TURNS = [{"role": "user", "content": "hello"}]
LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] | trim }} <|im_end|>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)


def prompt(asked: Any = "hello") -> Prompt:
    return Prompt(number=0, tokens=(1,), text="", row={"prompt": asked})


@pytest.mark.parametrize("template", [CHATML, THINKING, SPACED])
@pytest.mark.parametrize("asked", ["hello", [{"role": "system", "content": "be"}, *TURNS]])
@pytest.mark.parametrize("said", ["more", [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]])
def test_what_is_added_is_the_rest_of_the_rendered_conversation(template: str, asked: Any, said: Any) -> None:
    """Of a model that writes as the template does, tokens and added tokens are the tokens of the whole conversation."""
    tokenizer = build_tokenizer(template)
    turns = TURNS if isinstance(asked, str) else asked
    new = [{"role": "user", "content": said}] if isinstance(said, str) else said
    begun = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": "the sum"}, *new], add_generation_prompt=True, tokenize=False
    )
    wrote = begun + "the sum<|im_end|>"
    assert whole.startswith(wrote)
    tokens = tokenizer(wrote, add_special_tokens=False)["input_ids"]
    added = encode_observation(prompt(asked), tokens, said, tokenizer)
    assert tokenizer.decode([*tokens, *added]) == whole
    assert [*tokens, *added] == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_the_example_of_the_module() -> None:
    tokenizer = build_tokenizer()
    stop = tokenizer.eos_token_id
    added = encode_observation(prompt(), (5, stop), "higher", tokenizer)
    assert tokenizer.decode(added) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    # A turn that another token ended gets the template's own end.
    assert encode_observation(prompt(), (5, 6), "higher", tokenizer) == (stop, *added)


def test_a_blank_of_the_template_before_the_end_is_not_added_after_it() -> None:
    tokenizer = build_tokenizer(LLAMA)
    added = encode_observation(prompt(), (tokenizer.eos_token_id,), "so", tokenizer)
    assert tokenizer.decode(added) == "[INST] so [/INST]"


def test_without_a_template_text_is_added_as_it_is() -> None:
    tokenizer = build_tokenizer(None, bos=True)
    added = encode_observation(prompt(), (5,), "hello", tokenizer)
    assert tokenizer.decode(added) == "hello" and 1 not in added, "no beginning of text in the midst"
    with pytest.raises(ValueError, match="no chat_template"):
        encode_observation(prompt(), (5,), TURNS, tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "refuses the observation: never"),
        ("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}", "0 times"),
    ],
)
def test_templates_that_cannot_go_on(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_observation(prompt(), (5,), "more", build_tokenizer(template))


def test_steps_that_say_nothing_are_refused() -> None:
    assert Step(is_done=True, reward=1).observation is None
    assert type(Step(is_done=True, reward=numpy.float16(0.5)).reward) is float, "halves would add up as halves"
    for bad in (
        {},
        {"observation": ""},
        {"observation": "x", "reward": float("nan")},
        {"is_done": True, "reward": "1"},
        {"is_done": True, "reward": -(10**400)},
        {"is_done": True, "reward": numpy.float16("inf")},
        {"is_done": True, "reward": 1e39},  # beyond fp32, in which rewards are kept
    ):
        with pytest.raises(ValueError, match="finite number|is_done"):
            Step(**bad)


# ---- code of the user's own


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "game.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nruns = []\nruns.append(1)\n"
        "@dataclass\nclass Game:\n    row: dict\n    def step(self, text, tokens): return self.row['x']\n",
    )
    make = load_callable(f"{path}:Game", "field")
    assert make({"x": 3}).step("", ()) == 3
    monkeypatch.chdir(tmp_path)
    assert load_callable("game.py:Game", "field") is make
    assert import_file(Path("game.py")).runs == [1]
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "game.py", "def Game(row): return 1\n")
    assert load_callable(f"{other}:Game", "field") is not make, "a file of the same name is another one"


def test_an_environment_has_a_row_of_its_own(tmp_path: Path) -> None:
    """A prompt's row is that of all its completions, and of the next epoch."""
    path = write(tmp_path / "board.py", "def make(row):\n    row['board'].append('x')\n    return row['board']\n")
    make, row = load_environment(f"{path}:make"), {"board": []}
    assert [make(row), make(row)] == [["x"], ["x"]] and row == {"board": []}


def test_faults_of_user_code_are_told(tmp_path: Path) -> None:
    good = write(tmp_path / "good.py", "size = 3\ndef make(row): return row\ndef two(row, size): return row\n")
    bad = write(tmp_path / "bad.py", "import math\n\nx = 1 / 0\n")
    program = write(tmp_path / "program.py", "import sys\nsys.exit(0)\n")
    for name, message in (
        ("good.make", "a function is named as file.py:name"),
        (f"{tmp_path}/none.py:make", "no such file"),
        (f"{good}:mak", "has no mak; did you mean make"),
        (f"{good}:zzz", "has no zzz; it has make, two"),
        (f"{good}:size", "type int, which can't be called"),
        (f"{bad}:make", r"can't be imported: ZeroDivisionError: division by zero \(bad.py:3\)"),
        (f"{program}:make", r"can't be imported: SystemExit: 0 \(program.py:2\)"),  # not the run's silent end
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_callable(name, "rollout.environment")
        assert str(caught.value).startswith(f"rollout.environment={name!r}: ")
    assert not [name for name in sys.modules if name.endswith("_bad")], "what failed is run again"
    with pytest.raises(ValueError, match=r"is called with a row alone, and it is \(row, size\)"):
        load_environment(f"{good}:two")
