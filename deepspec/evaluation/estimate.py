"""Settings of evaluation.json whose acceptance was computed: along the target's own answers, or at fixed anchors."""

from types import MappingProxyType
from typing import Any, Callable, Mapping, Optional, Sequence

from deepspec import distributed
from deepspec.artifacts import canonical_hash
from deepspec.data.batch import Sample
from deepspec.data.sources import encode_samples
from deepspec.evaluation.analytic import AnchorValues
from deepspec.evaluation.answers import Answer, answer_values, continued, teacher_forced_values
from deepspec.evaluation.drafted import anchors_per_sample, drafted_values
from deepspec.evaluation.slices import of_anchors
from deepspec.evaluation.summary import Setting, Speed
from deepspec.targets.sampling import Sampling

ANALYTIC, DRAFTED, TEACHER_FORCED = "analytic", "drafted", "teacher_forced"
NO_MODES: Mapping[str, bool] = MappingProxyType({})
Parts = dict[str, tuple[str, AnchorValues, list[str]]]  # benchmark: domain, anchors, what was read


def _together(setting: Setting, parts: Parts, edges: Sequence[int], modes: Mapping[str, bool]) -> Setting:
    """``setting`` with the anchors of all ranks; complete on rank 0, this rank's own elsewhere. Collective."""
    gathered = distributed.gather_objects(parts)
    everyone: list[Parts] = [parts] if gathered is None else gathered  # type: ignore[assignment]
    found, texts = [], []
    for name, (domain, _, _) in parts.items():
        values = AnchorValues.concatenate([part[name][1] for part in everyone])
        setting.add(name, domain, values.counts(), Speed())
        setting.tell_apart(of_anchors(values, edges, modes))
        setting.anchors[name] = int((values.weight > 0).sum())
        found.append(values)
        texts += sorted(text for part in everyone for text in part[name][2])
    setting.values = AnchorValues.concatenate(found) if found else None
    setting.text = canonical_hash(texts)
    return setting


def along_answers(target: Any, drafter: Any, answers: dict[str, tuple[str, list[Answer]]], setting: Setting,
                  sampling: Sampling, *, edges: Sequence[int] = (), modes: Mapping[str, bool] = NO_MODES,
                  progress: Optional[Callable[..., Any]] = None) -> Setting:
    """Expected rounds of decoding along ``answers`` of this rank (benchmark: domain, answers). Collective.

    ``edges`` cut context lengths into ranges, ``modes`` says which conversations reason (slices.py).
    """
    parts: Parts = {}
    for name, (domain, cut) in answers.items():
        own = continued(target, cut, sampling, length=drafter.shape.draft_length, batch_size=setting.batch_size)
        values = answer_values(target, drafter, own, sampling)
        parts[name] = domain, values, [canonical_hash([item.id, item.prompt_ids, item.token_ids]) for item in own]
        if progress is not None:
            progress(0, len(own))
    return _together(setting, parts, edges, modes)


def at_anchors(target: Any, drafter: Any, samples: Sequence[Sample], setting: Setting, sampling: Sampling, *,
               anchors: int, batch_size: int, name: str, edges: Sequence[int] = (),
               progress: Optional[Callable[..., Any]] = None) -> Setting:
    """Expected rounds at about ``anchors`` anchors of held-out ``samples`` (all ranks have all of them), per domain.

    ``setting.estimator`` says along which prefixes. Anchors are spread evenly over samples and drawn from the sample's
    id, so every drafter of this target meets the same ones. Collective.
    """
    each = anchors_per_sample(samples, anchors)
    parts: Parts = {}
    for domain in sorted({item.domain for item in samples}):
        own = [item for item in samples if item.domain == domain][distributed.rank()::distributed.world_size()]
        if setting.estimator == DRAFTED:
            values = drafted_values(target, drafter, own, sampling, num_anchors=each, batch_size=batch_size)
        else:
            found = (encode_samples(target, [item])[0] for item in own)
            values = teacher_forced_values(target, drafter, found, sampling, num_anchors=each, seed=0)
        parts[f"{name}-{domain}"] = domain, values, [canonical_hash([item.sample_id, item.input_ids.tolist(), each])
                                                     for item in own]
        if progress is not None:
            progress(0, len(own))
    return _together(setting, parts, edges, NO_MODES)
