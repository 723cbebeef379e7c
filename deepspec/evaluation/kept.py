"""What an evaluation keeps of the one before it: settings it did not measure again."""

from typing import Any, Mapping

_SAME = ("schema_version", "drafter", "target_sha256", "max_new_tokens", "seed")


def with_kept(report: dict[str, Any], previous: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``report`` with the settings of ``previous`` that it lacks, and their names.

    Nothing is kept of another drafter, target, seed or length of answers, and no setting of other prompts. Decoded
    figures that are kept stay the ones that acceptance is quoted from.
    """
    settings = report["settings"]
    if any(previous.get(key) != report.get(key) for key in _SAME) or not isinstance(previous.get("settings"), Mapping):
        return report, []
    prompts = _prompts(settings)
    kept = {name: values for name, values in previous["settings"].items()
            if name not in settings and _agree(_prompts({name: values}), prompts)}
    if not kept:
        return report, []
    merged = report | {"settings": kept | settings}
    default = previous.get("default_setting")
    quoted = settings.get(report.get("default_setting"), {})
    if default in kept and kept[default].get("mode") == "sampled" and quoted.get("mode") != "sampled":
        merged |= {key: previous[key] for key in ("default_setting", "macro", "untrained") if key in previous}
    return merged, sorted(kept)


def _prompts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Number of prompts of every benchmark."""
    return {name: values.get("num_prompts") for setting in settings.values()
            for name, values in setting.get("benchmarks", {}).items()}


def _agree(old: dict[str, Any], new: dict[str, Any]) -> bool:
    shared = set(old) & set(new)
    return bool(shared) and all(old[name] == new[name] for name in shared)
