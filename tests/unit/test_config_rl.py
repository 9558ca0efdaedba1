"""What must hold between the fields for ``stage: rl``: each rule with the field it names and its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import Problem, Recipe, check_recipe
from moesaic.config.check import CHECKS
from moesaic.config.fields import list_fields
from moesaic.config.parse import parse_recipe
from moesaic.config.recipe import RL_FIELDS
from moesaic.config.rl_check import rejection_bounds
from moesaic.config.rl_unused import COUNTS_FOR
from tests.unit.model_folders import write_model_folder

QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model_folder(tmp_path, QWEN)
    return tmp_path


def find(model: Path, fields: Mapping[str, Any], world_size: int | None = 4) -> dict[str, Problem]:
    """Problems by field of a GRPO recipe without any, with ``fields`` laid over it, sections key by key."""
    plain: dict[str, Any] = {
        "model": str(model),
        "train_dataset": "some/prompts",
        "output_dir": str(model / "run"),
        "stage": "rl",
        "global_batch_size": 8,
        "rollout": {"sampling": {"n": 4}},
        "reward": {"functions": ["exact_match"]},
    }
    recipe = Recipe.model_validate(lay(plain, fields))
    found = check_recipe(recipe, world_size)
    assert len({(problem.field, problem.rule) for problem in found}) == len(found), found
    return {problem.field: problem for problem in found}


def lay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    laid = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(laid.get(key, {}), Mapping)
        laid[key] = lay(laid.get(key, {}), value) if both else value
    return laid


def sampling(**fields: object) -> dict[str, object]:
    return {"rollout": {"sampling": fields}}


PATH_B = {"dist_config": {"name": "moesaic", "ep_size": 2}}
GAE = {"algorithm": {"adv_estimator": "gae"}}
TEACHER = {"teacher": {"model": "TEACHER"}}
PURE = {"reward": {"functions": []}, **TEACHER}
TOP_K = {"distillation_config": {"mode": "forward_kl_topk"}, **PURE}

# Fields -> the field that is named, and a part of the rule or of the remedy.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # rewards
    ({"reward": {"functions": []}}, "reward.functions", "what a completion is worth"),
    ({"reward": {"weights": [1, 2]}}, "reward.weights", "give 1 weights"),
    ({"reward": {"functions": "exact"}}, "reward.functions", "file.py:name"),
    ({"reward": {"functions": "rewards.py"}}, "reward.functions", "file.py:name"),
    ({"reward": {"functions": "no/such.py:score"}}, "reward.functions", "no such file"),
    ({"reward": {"functions": "reasoning_gym"}}, "reward.functions", "its own tasks"),
    ({"reward": {"overlong_buffer_len": 512}}, "reward.overlong_buffer_len", "max_tokens: 512"),
    ({"rollout": {"environment": "no.py:make"}}, "rollout.environment", "no such file"),
    # estimators, aggregation, losses
    (sampling(n=1), "rollout.sampling.n", "compares a prompt's completions"),
    ({"algorithm": {"adv_estimator": "dr_grpo"}, **sampling(n=1)}, "rollout.sampling.n", "dr_grpo"),
    ({"algorithm": {"loss_agg_mode": "seq-mean-token-sum-norm"}}, "algorithm.loss_scale_factor", "max_tokens: 512"),
    ({"algorithm": {"loss_mode": "cispo", "cispo_ratio_max": 0.28}}, "algorithm.cispo_ratio_max", "1 between"),
    ({"algorithm": {"loss_mode": "cispo", "cispo_ratio_min": 1.2}}, "algorithm.cispo_ratio_min", "1 between"),
    ({**GAE, "critic": {"critic_warmup": 5}, "max_steps": 5}, "critic.critic_warmup", "before the actor"),
    # divergence
    ({"kl_config": {"use": "loss", "estimator": "k1"}}, "kl_config.estimator", "expectation zero"),
    ({"kl_config": {"use": "reward"}}, "kl_config.estimator", "set k1"),
    ({"kl_config": {"use": "loss", "target": 0.1}}, "kl_config.target", "kl_config.use: reward"),
    # batches
    ({"global_batch_size": None}, "global_batch_size", "how many prompts"),
    ({"algorithm": {"ppo_mini_batch_size": 3}}, "algorithm.ppo_mini_batch_size", "choose one of [1, 2, 4, 8]"),
    # sampling
    (sampling(temperature=0), "rollout.sampling.temperature", "nothing is explored"),
    (
        {"rollout": {"val_sampling": {"temperature": 0, "n": 2}}, "eval_dataset": "d"},
        "rollout.val_sampling.n",
        "all the same",
    ),
    ({"rollout": {"val_sampling": {"n": 2}}}, "rollout.val_sampling", "set eval_dataset"),
    # corrections
    (
        {"correction_config": {"bypass_mode": True}, **sampling(temperature=0.7)},
        "correction_config.bypass_mode",
        "of temperature 1, the policy's of 0.7",
    ),
    ({"correction_config": {"bypass_mode": True, "rollout_is": "token"}}, "correction_config.rollout_is", "the ratio"),
    (
        {
            "correction_config": {
                "bypass_mode": True,
                "rollout_rs": ["token_k2"],
                "rollout_rs_threshold": ["0.1"],
            }
        },
        "correction_config.rollout_rs",
        "the ratio",
    ),
    (
        {"correction_config": {"rollout_is": "icepop", "rollout_is_threshold_lower": 2.0}},
        "correction_config.rollout_is_threshold_lower",
        "below rollout_is_threshold: 2.0",
    ),
    ({"correction_config": {"rollout_rs": ["token_k1"]}}, "correction_config.rollout_rs_threshold", "give 1"),
    (
        {"correction_config": {"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.2"]}},
        "correction_config.rollout_rs_threshold",
        "0.5_2.0",
    ),
    (
        {"correction_config": {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": ["0.5_2.0"]}},
        "correction_config.rollout_rs_threshold",
        "one threshold",
    ),
    (
        {"correction_config": {"rollout_rs": ["token_k2", "token_k2"], "rollout_rs_threshold": ["1", "2"]}},
        "correction_config.rollout_rs",
        "twice",
    ),
    # dynamic sampling
    (
        {"algorithm": {"adv_estimator": "remax", "filter_groups": True}, **sampling(n=1)},
        "algorithm.filter_groups",
        "n to 2",
    ),
    (
        {**PURE, "distillation_config": {"mode": "forward_kl_topk"}, "algorithm": {"adv_estimator": "remax"}},
        "algorithm.adv_estimator",
        "no advantage is estimated",
    ),
    (
        {"algorithm": {"filter_groups": True}, "reward": {"functions": [], "model": "SCORER"}},
        "algorithm.filter_groups",
        "only a model",
    ),
    (
        {"algorithm": {"filter_groups": True}, "distillation_config": {"mode": "forward_kl_topk"}, **TEACHER},
        "algorithm.filter_groups",
        "equal rewards too",
    ),
    # distillation
    ({"distillation_config": {"mode": "forward_kl_topk"}}, "teacher.model", "to learn from"),
    (
        {"distillation_config": {"mode": "policy_gradient"}, **TEACHER},
        "algorithm.adv_estimator",
        "set on_policy_distillation",
    ),
    ({"algorithm": {"adv_estimator": "on_policy_distillation"}}, "algorithm.adv_estimator", "policy_gradient"),
    (
        {"distillation_config": {"mode": "forward_kl_topk"}, **PURE, **GAE},
        "algorithm.adv_estimator",
        "no advantage is estimated",
    ),
    (
        {
            "distillation_config": {"mode": "forward_kl_topk"},
            "kl_config": {"use": "reward", "estimator": "k1"},
            **PURE,
        },
        "kl_config.use",
        "no advantages of rewards",
    ),
    # what only a policy loss would read
    *(
        ({**TOP_K, "algorithm": {name: value}}, f"algorithm.{name}", part)
        for name, value, part in (
            ("adv_estimator", "rloo", "no advantage is estimated"),
            ("loss_mode", "gspo", "there is no policy loss"),
            ("clip_ratio_low", 0.1, "there is no policy loss"),
            ("clip_ratio_high", 0.28, "there is no policy loss"),
            ("clip_ratio_c", None, "there is no policy loss"),
        )
    ),
    ({**TOP_K, "correction_config": {"rollout_is": "token"}}, "correction_config.rollout_is", "there is no policy"),
    (
        {**TOP_K, "distillation_config": {"mode": "forward_kl_topk", "topk": 97}, "model": "WORDS"},
        "distillation_config.topk",
        "has 96 tokens",
    ),
    # lengths
    (sampling(max_tokens=1537), "rollout.sampling.max_tokens", "at most 2048 together"),
    (
        {"rollout": {"val_sampling": {"max_tokens": 4096, "temperature": 0}}, "eval_dataset": "d"},
        "rollout.val_sampling.max_tokens",
        "2048 positions",
    ),
    ({"micro_batch_tokens": 1000}, "micro_batch_tokens", "set 1024 or more"),
    (
        {
            "rollout": {"val_sampling": {"max_tokens": 600, "temperature": 0}},
            "eval_dataset": "d",
            "micro_batch_tokens": 1100,
            "reward": {"model": "SCORER"},
        },
        "rollout.val_sampling.max_tokens",
        "set at most 588, or micro_batch_tokens: 1112 or more",
    ),
    ({"cutoff_len": 4096}, "cutoff_len", "1024 is the longest"),
    # the engine
    ({"rollout": {"engine": "vllm"}}, "rollout.engine", "not yet"),
    ({"rollout": {"pp_size": 2}}, "rollout.pp_size", "remove it, or set 1"),
    ({"rollout": {"enable_expert_parallel": True}}, "rollout.enable_expert_parallel", "vllm's"),
    ({"rollout": {"stop_token_ids": [7, 96]}, "model": "WORDS"}, "rollout.stop_token_ids", "from 0 to 95"),
    ({"rollout": {"dp_size": 2}}, "rollout.dp_size", "set 4"),
    ({"rollout": {"dp_size": 4, "ep_size": 4}}, "rollout.dp_size", "one replica"),
    ({"rollout": {"ep_size": 2, "tp_size": 2}}, "rollout.tp_size", "shares sequences"),
    ({"rollout": {"ep_size": 3}}, "rollout.ep_size", "must divide the 4 ranks"),
    # what supervised training has
    ({"packing": True}, "packing", "micro_batch_tokens"),
    ({"load_best_model_at_end": True, "eval_dataset": "d"}, "load_best_model_at_end", "there is none"),
    ({"dump": {"steps": [1]}}, "dump.steps", "not yet"),
    ({"router_config": {"z_loss_coef": 0.1}}, "router_config", "not yet"),
    ({"train_dataset": {"path": "d", "streaming": True}, "max_steps": 3}, "train_dataset.streaming", "one shuffled"),
    ({"train_dataset": [{"path": "d", "weight": 1}]}, "train_dataset.weight", "one shuffled"),
    # data
    ({"train_dataset": {"path": "d", "format": "messages"}}, "train_dataset.format", "reads prompts"),
    ({"train_dataset": {"path": "d", "size": 9}}, "train_dataset.size", "reasoning_gym alone"),
    ({"train_dataset": {"path": "d", "options": {"seed": 1}}}, "train_dataset.options", "reasoning_gym alone"),
    ({"train_dataset": {"path": "chain_sum", "format": "reasoning_gym"}}, "train_dataset.size", "how many"),
    # roles
    ({"actor": {"model": "m"}}, "actor.model", "top level"),
    ({"actor": {"dist": "fsdp2", "ep_size": 2}}, "actor.ep_size", "no expert axis"),
    (
        {"actor": {"ppo_micro_batch_size_per_gpu": 2, "micro_batch_tokens": 4096}},
        "actor.ppo_micro_batch_size_per_gpu",
        "one of the two",
    ),
    ({"actor": {"ep_size": 3}}, "actor.ep_size", "must divide the 4 ranks"),
    ({"actor": {"cp_size": 8}}, "actor.cp_size", "must divide the 4 ranks"),
    ({**GAE, "critic": {"tp_size": 3}}, "critic.tp_size", "divide the 4 ranks"),
    ({**GAE, "critic": {"mp_replicate_size": 3}}, "critic.mp_replicate_size", "choose one of [1, 2, 4]"),
    ({**GAE, "critic": {"ep_size": 4, "edp_size": 2}}, "critic.ep_size", "with edp_size 2 choose ep_size among [1, 2]"),
    ({**GAE, "critic": {"model": "DENSE", "ep_size": 2}}, "critic.model", "no experts"),
    ({**GAE, **PATH_B, "critic": {"model": "DENSE"}}, "critic.model", "no experts"),
    ({**GAE, "critic": {"model": "nowhere"}}, "critic.model", "no such folder"),
    ({"kl_config": {"use": "loss"}, "ref": {"ep_size": 8}}, "ref.ep_size", "must divide the 4 ranks"),
    ({"kl_config": {"use": "loss"}, "ref": {"micro_batch_tokens": 1000}}, "ref.micro_batch_tokens", "set 1024"),
    ({"reward": {"model": "nowhere"}}, "reward.model", "no such folder"),
    ({"reward": {"model": "BARE"}}, "reward.model", "lacks model.safetensors"),
    (
        {"distillation_config": {"mode": "forward_kl_topk"}, **PURE, "teacher": {"model": "nowhere"}},
        "teacher.model",
        "no such folder",
    ),
    # an update reaches every rank
    ({"algorithm": {"ppo_mini_batch_size": 1}, **sampling(n=2)}, "algorithm.ppo_mini_batch_size", "set 2 or more"),
    ({"global_batch_size": 1, **sampling(n=3)}, "global_batch_size", "set 2 or more"),
    # a replica
    ({"rollout": {"tp_size": 3}}, "rollout.tp_size", "4 attention heads"),
    ({"rollout": {"tp_size": 4}, "attn_implementation": "sdpa", "model": "HEADS"}, "rollout.tp_size", "6 attention"),
    ({"rollout": {"tp_size": 8}, "model": "DENSE"}, "rollout.tp_size", "heads"),
]


def with_folders(fields: object, model: Path) -> Any:
    """Names in capitals are folders of models beside ``model``."""
    configs: dict[str, dict[str, Any]] = {
        "TEACHER": QWEN,
        "SCORER": QWEN,
        "DENSE": {"model_type": "qwen3_moe", "num_attention_heads": 4},
        "BARE": QWEN,
        "HEADS": {**QWEN, "num_attention_heads": 6},
        "WORDS": {**QWEN, "vocab_size": 96},
    }
    if isinstance(fields, dict):
        return {key: with_folders(value, model) for key, value in fields.items()}
    if isinstance(fields, str) and fields in configs:
        folder = model / fields
        folder.mkdir(exist_ok=True)
        write_model_folder(folder, configs[fields])
        if fields == "BARE":
            (folder / "model.safetensors").unlink()
        return str(folder)
    return fields


@pytest.mark.parametrize(("fields", "field", "part"), REFUSED, ids=[f"{each[1]}-{n}" for n, each in enumerate(REFUSED)])
def test_refused(model: Path, fields: dict[str, Any], field: str, part: str) -> None:
    found = find(model, with_folders(fields, model))
    assert list(found) == [field], [str(problem) for problem in found.values()]
    assert part in f"{found[field].rule} {found[field].remedy}"


ACCEPTED: list[dict[str, Any]] = [
    {},
    PATH_B,
    {"micro_batch_tokens": 1024},
    {"cutoff_len": 1024},
    {"algorithm": {"ppo_mini_batch_size": 1}},
    {"algorithm": {"adv_estimator": "remax"}, **sampling(n=1)},
    {"algorithm": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}, **sampling(n=1)},
    {"algorithm": {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 512}},
    {
        "algorithm": {"adv_estimator": "gae", "lam": 0.95},
        "critic": {"dist": "fsdp2", "learning_rate": 1e-5, "critic_warmup": 2},
        **PATH_B,
    },
    {"algorithm": {"filter_groups": True, "clip_ratio_high": 0.28}, "reward": {"overlong_buffer_len": 128}},
    {"algorithm": {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}},
    {"algorithm": {"loss_mode": "cispo", "cispo_ratio_max": 1.28}},
    {"kl_config": {"use": "loss"}, "ref": {"ep_size": 4}},
    {"kl_config": {"use": "reward", "estimator": "k1", "target": 0.1, "horizon": 100}},
    {"reward": {"functions": [], "model": "SCORER"}},
    {"reward": {"model": "SCORER", "weights": [1, 0.5]}},
    {
        "distillation_config": {"mode": "policy_gradient"},
        "algorithm": {"adv_estimator": "on_policy_distillation"},
        **PURE,
        **sampling(n=1),
    },
    {"distillation_config": {"mode": "forward_kl_topk", "topk": 8}, **PURE, **sampling(n=1)},
    {"distillation_config": {"mode": "forward_kl_topk", "use_task_rewards": True}, **TEACHER},
    {
        "distillation_config": {"mode": "forward_kl_topk", "use_task_rewards": True},
        **TEACHER,
        "algorithm": {"adv_estimator": "rloo", "loss_mode": "gspo", "clip_ratio_low": 1e-3},
        "correction_config": {"rollout_is": "token"},
    },
    {
        **TOP_K,
        "correction_config": {"bypass_mode": True},
        "algorithm": {"entropy_coeff": 0.1, "ppo_epochs": 2},
        "kl_config": {"use": "loss"},
    },
    {"rollout": {"stop_token_ids": [0, 95]}, "model": "WORDS"},
    {"correction_config": {"rollout_is": "icepop", "rollout_is_threshold": 5.0}},
    {
        "correction_config": {
            "rollout_rs": ["seq_mean_k1", "seq_max_k2"],
            "rollout_rs_threshold": ["0.999_1.001", "1e-1"],
        }
    },
    {"correction_config": {"bypass_mode": True}},
    {"rollout": {"val_sampling": {"n": 4, "temperature": 0.6, "top_p": 0.95}}, "eval_dataset": "d"},
    {"rollout": {"tp_size": 2, "dp_size": 2}},
    {"rollout": {"ep_size": 4}, **PATH_B},
    {"train_dataset": {"path": "d", "format": "verl"}},
    {"actor": {"cp_size": 2}, "critic": {}, "algorithm": {"ppo_epochs": 2}},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=[f"{n}" for n in range(len(ACCEPTED))])
def test_accepted(model: Path, fields: dict[str, Any]) -> None:
    assert find(model, with_folders(fields, model)) == {}


def changed(default: object) -> object:
    """Another value than a field's default, of its type."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return type(default)(default + 1) if default >= 1 else default + 0.05
    return default


# Where the default doesn't tell what another value would be.
OTHER_VALUES = {
    "ref": {"cp_size": 2},
    "critic": {"cp_size": 2},
    "teacher": {"cp_size": 2},
    "kl_config.estimator": "k3",
    "kl_config.target": 0.5,
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    "algorithm.loss_scale_factor": 4.0,
    "correction_config.rollout_rs_threshold": ["0.1"],
    "distillation_config.loss_max_clamp": 1.0,
}


@pytest.mark.parametrize("path", [path for path in COUNTS_FOR if path != "rollout.max_batch_tokens"])
def test_what_nothing_would_read_is_refused(model: Path, path: str) -> None:
    default = next(field.default for field in list_fields() if field.path == path)
    section, _, key = path.rpartition(".")
    value = OTHER_VALUES.get(path, changed(default))
    fields = {section: {key: value}} if section else {key: value}
    if path.startswith("algorithm.clip_ratio"):
        fields["algorithm"]["loss_mode"] = "gpg"  # type: ignore[index]
    if path.startswith("reward.timeout"):
        fields = lay(fields, {"reward": {"functions": []}, "rollout": {"environment": str(model / "env.py:make")}})
        (model / "env.py").touch()
    found = find(model, fields)
    assert list(found) == [path] and "alone" in found[path].rule


@pytest.mark.parametrize("name", RL_FIELDS)
def test_reinforcement_learning_is_a_stage(model: Path, name: str) -> None:
    values: dict[str, Any] = {
        "rollout": {"max_turns": 2},
        "reward": {"functions": ["exact_match"]},
        "algorithm": {"gamma": 0.5},
        "kl_config": {"use": "loss"},
        "correction_config": {"bypass_mode": True},
        "distillation_config": {"topk": 3},
        "park_idle_roles": False,
    }
    fields = {name: values.get(name, {"cp_size": 2}), "model": str(model), "train_dataset": "d"}
    recipe = Recipe.model_validate({"output_dir": str(model / "run"), **fields})
    (problem,) = check_recipe(recipe, 4)
    assert (problem.field, problem.rule) == (name, "counts for stage: rl alone")


@pytest.mark.parametrize("form", ["prompt", "verl", "reasoning_gym"])
@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_prompts_have_nothing_to_learn_from(model: Path, form: str, stage: str) -> None:
    dataset = {"path": "d", "format": form, "size": 4 if form == "reasoning_gym" else None}
    recipe = Recipe.model_validate(
        {"model": str(model), "train_dataset": dataset, "stage": stage, "output_dir": str(model / "run")}
    )
    (problem,) = check_recipe(recipe, 4)
    assert problem.field == "train_dataset.format"


def test_a_problem_of_the_recipe_is_said_once(model: Path) -> None:
    fields = {"cp_size": 8, **GAE, "kl_config": {"use": "loss"}}
    assert list(find(model, fields)) == ["cp_size"], "actor, critic and ref inherit it"


def test_packages_that_are_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = find(model, {"reward": {"functions": ["math", "exact_match"]}, "report_to": []})
    assert found["reward.functions"].rule == "the package math_verify isn't installed"
    made = {"path": "chain_sum", "format": "reasoning_gym", "size": 4}
    found = find(model, {"train_dataset": made, "report_to": []})
    assert found["train_dataset.format"].rule == "the package reasoning_gym isn't installed"


def test_functions_are_named_by_file_and_name(model: Path) -> None:
    (model / "rewards.py").write_text("raise RuntimeError('never imported by a check')")
    assert find(model, {"reward": {"functions": [f"{model}/rewards.py:score", "exact_match"]}}) == {}


def test_bounds_of_rejection() -> None:
    assert (rejection_bounds("0.5_2.0"), rejection_bounds("4")) == ((0.5, 2.0), (0.25, 4.0))
    assert [rejection_bounds(text) for text in ("0.5", "2_1", "a_b", "0_1", "1_inf", "1_2_3", "")] == [None] * 7


def test_checks_name_fields_that_there_are() -> None:
    known = {field.path for field in list_fields()}
    named = {name.removesuffix(".*") for check in CHECKS for name in check.needs}
    assert named - known == {"files of model"}


def test_a_bare_off_is_off() -> None:
    """YAML 1.1 reads it as false."""
    recipe = Recipe.model_validate(
        {"model": "m", "train_dataset": "d", "kl_config": {"use": False}, "distillation_config": {"mode": False}}
    )
    assert (recipe.kl_config.use, recipe.distillation_config.mode) == ("off", "off")


def test_validation_draws_as_many_tokens_as_training() -> None:
    def read(**rollout: object) -> int:
        recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", "rollout": rollout})
        assert recipe.rollout.val_sampling is not None
        return recipe.rollout.val_sampling.max_tokens

    assert read(sampling={"max_tokens": 8192}, val_sampling={"n": 4}) == 8192
    assert read(sampling={"max_tokens": 8192}, val_sampling={"max_tokens": 16}) == 16
    assert read(val_sampling={"n": 4}) == 512
    _, problems, _ = parse_recipe(
        {"model": "m", "train_dataset": "d", "rollout": {"sampling": {"max_tokens": 0}, "val_sampling": {"n": 4}}}
    )
    assert [problem.field for problem in problems] == ["rollout.sampling.max_tokens"]
