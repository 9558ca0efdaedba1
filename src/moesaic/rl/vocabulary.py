"""Roles read the actor's tokens by their numbers: those must stand for the same in every role's model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from moesaic.config import Recipe
from moesaic.config.roles import RoleName, active_roles, role_recipe

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def require_same_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse models of roles that would read other tokens than the actor wrote. Not collective; reads configs, and the
    tokenizers of folders that have one.

    Args:
        tokenizer: of the actor.

    Raises:
        ValueError: a model of fewer tokens; a tokenizer that has another token under a number of the actor's; a teacher
            whose likeliest tokens may be none of the actor's.
    """
    size = _vocab_size(recipe.model)
    for name in active_roles(recipe):
        folder = role_recipe(recipe, name).model
        if folder == recipe.model:
            continue
        own = _vocab_size(folder)
        _require_sizes(recipe, name, folder, own, size)
        if any((Path(folder) / file).is_file() for file in TOKENIZER_FILES):
            _require_same_ids(name, folder, tokenizer)


def _vocab_size(folder: str) -> int:
    size: int = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size
    return size


def _require_sizes(recipe: Recipe, name: RoleName, folder: str, own: int, size: int) -> None:
    if own < size:
        raise ValueError(
            f"{_field(name)}={folder!r}: its vocabulary has {own} tokens, and the actor's {size}; it couldn't read "
            "all that the actor writes. Take a model with the actor's tokenizer."
        )
    if recipe.distillation_config.mode != "forward_kl_topk" or name != "teacher":
        return
    if own != size:
        raise ValueError(
            f"{_field(name)}={folder!r}: its vocabulary has {own} tokens, and the actor's {size}; the actor can't "
            "learn tokens that it hasn't got. Set distillation_config.mode: policy_gradient, which asks for the "
            "actor's only."
        )
    if recipe.distillation_config.topk > own:
        raise ValueError(f"distillation_config.topk={recipe.distillation_config.topk}: {folder} has {own} tokens.")


def _require_same_ids(name: RoleName, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    others = {number: token for token, number in AutoTokenizer.from_pretrained(folder).get_vocab().items()}
    pairs = [(number, token, others.get(number, token)) for token, number in sorted(tokenizer.get_vocab().items())]
    different = [pair for pair in pairs if pair[1] != pair[2]]
    if different:
        number, token, other = different[0]
        raise ValueError(
            f"{_field(name)}={folder!r}: its tokenizer isn't the actor's, {len(different)} of {len(pairs)} tokens "
            f"differ (e.g. {number} is {other!r} there, and {token!r} to the actor). Take a model with the actor's "
            "tokenizer."
        )


def _field(name: RoleName) -> str:
    return "reward.model" if name == "reward" else f"{name}.model"
