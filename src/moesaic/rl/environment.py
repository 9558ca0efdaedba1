"""Environments: what answers the model between its turns, and how an answer becomes tokens.

A recipe names a function that makes one environment of a row, ``rollout.environment: game.py:make``::

    class Guess:                                            # game.py
        def __init__(self, row):
            self.number = row["number"]

        def step(self, text, tokens):
            guess = int(text)                               # an error ends the trajectory, and is counted
            if guess == self.number:
                return Step(reward=1.0, is_done=True)
            return Step(observation="higher" if guess < self.number else "lower")

    def make(row):
        return Guess(row)

The model's tokens are kept as it wrote them; only what follows them is made here. With a chat template that is what
the template writes between the model's turn and its next one. Example, ChatML, the model wrote ``4 <|im_end|>``::

    rendered   ..<|im_start|>assistant\\n X <|im_end|>\\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n
                                          ^^^^^^^^^^ the model's own stop token: it is there already
    added                                           \\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n

X stands for the model's turn, whatever it was: an answer that would be tokenized in another way than the model wrote it
never is. Without a template the observation's text is added as it is.
"""

from __future__ import annotations

import copy
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from moesaic.engines.prompts import Turns, to_prompt
from moesaic.rl.types import Prompt
from moesaic.rl.user_code import load_callable

PLACEHOLDER = "MoesaicPlaceOfTheTurn"
"""Stands for the model's turn where a conversation is rendered: letters alone, which no template changes."""

MAX_REWARD = torch.finfo(torch.float32).max
"""Rewards are kept in fp32: what is larger would be infinite there."""

Observation = str | Sequence[Mapping[str, str]]
"""A user's turn, or turns, each with role and content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn of the model.

    Attributes:
        observation: what the model reads next; None only where it is done.
        reward: of this turn; a trajectory's are added up.
        is_done: the trajectory ends here.

    Raises:
        ValueError: a reward that isn't a finite number in fp32, or nothing to go on with.
    """

    observation: Observation | None = None
    reward: float = 0.0
    is_done: bool = False

    def __post_init__(self) -> None:
        reward = finite(self.reward) if isinstance(self.reward, numbers.Real) else None
        if reward is None:
            raise ValueError("reward: a finite number, of those that fp32 has.")
        object.__setattr__(self, "reward", reward)  # numbers of numpy's would add up in their own precision
        if not self.is_done and not self.observation:
            raise ValueError(f"observation={self.observation!r}: text or turns, or is_done=True.")


def finite(value: SupportsFloat) -> float | None:
    """``value`` as a float; None where fp32 has no such finite number."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_REWARD else None  # NaN isn't


class Environment(Protocol):
    """Of one trajectory: its state lives as long as that."""

    def step(self, text: str, tokens: Sequence[int]) -> Step:
        """Answer the model's turn.

        Args:
            text: of the turn, without special tokens.
            tokens: of the turn, with the stop token.
        """
        ...


MakeEnvironment = Callable[[Mapping[str, Any]], Environment]


def load_environment(name: str) -> MakeEnvironment:
    """The function that ``rollout.environment`` names, ``file.py:name``: it makes an environment of a row, and is given
    a copy, to play on: the row itself is that of all completions of the prompt.

    Raises:
        ValueError: it can't be loaded, or doesn't take a row alone.
    """
    make = load_callable(name, "rollout.environment")
    try:
        inspect.signature(make).bind({})
    except TypeError as error:
        raise ValueError(
            f"rollout.environment={name!r}: is called with a row alone, and it is {inspect.signature(make)}: {error}."
        ) from error
    return lambda row: make(copy.deepcopy(row))


def encode_observation(
    prompt: Prompt, tokens: Sequence[int], observation: Observation, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Tokens to add after the model's turn, so that its next one can follow (the module's example).

    Args:
        prompt: of the trajectory; a text is a user's turn where the tokenizer has a chat template.
        tokens: of the model's turn, or of the trajectory up to its end.

    Raises:
        ValueError: turns without a template, or that it refuses; a template that doesn't write the model's turn; an
            observation of no token.
    """
    if tokenizer.chat_template:
        ids = _encode_turns(prompt, tokens[-1], _as_turns(observation), tokenizer)
    elif isinstance(observation, str):
        ids = tokenizer(observation, add_special_tokens=False)["input_ids"]
    else:
        raise ValueError("the observation is turns, and the tokenizer has no chat_template; give text.")
    if not ids:
        raise ValueError(f"the observation {observation!r} is no token at all to the tokenizer.")
    return tuple(ids)


def _as_turns(observation: Observation) -> Turns:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [dict(turn) for turn in observation]


def _encode_turns(prompt: Prompt, last: int, turns: Turns, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What follows the model's turn; its stop token, which the template writes too, is ``last`` where it wrote it."""
    asked = to_prompt(prompt.row, is_chat=True).asked
    assert not isinstance(asked, str)
    conversation = [*asked, {"role": "assistant", "content": PLACEHOLDER}, *turns]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the observation: {error}") from error
    assert isinstance(text, str)
    if text.count(PLACEHOLDER) != 1:
        raise ValueError(f"the chat template writes the model's turn {text.count(PLACEHOLDER)} times, not once.")
    ids: list[int] = tokenizer(text.partition(PLACEHOLDER)[2], add_special_tokens=False)["input_ids"]
    place = ids.index(last) if last in ids else -1
    # Before it there may be a blank that the template puts there; further on, it ends another turn.
    is_own = place >= 0 and not str(tokenizer.decode(ids[:place])).strip()
    return ids[place + 1 :] if is_own else ids
