"""Stage: the target's hidden states of every sample, into a feature store."""

import contextlib
import logging
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.extraction import QUARANTINE_LIMIT, Quarantine, Work, allowed_aside
from deepspec.data.feature_format import (
    COMMAND, INDEX, PRODUCER, STORE_VERSION, BadFeatures, StoreHeader, convention_of, describe_estimate, estimate_bytes,
    human_bytes, require_disk,
)
from deepspec.data.feature_shards import FeatureWriter, clean_shards, finished_samples, join_index
from deepspec.data.jsonl import read_rows
from deepspec.data.progress import Progress
from deepspec.data.prompts import SPLITS
from deepspec.data.rendering import Renderer
from deepspec.data.rendezvous import Rendezvous, wait_for
from deepspec.data.samples import load_samples
from deepspec.data.served import Refusal, ServedTarget
from deepspec.data.sources import encode_samples
from deepspec.errors import InputRefused, UserError
from deepspec.stages.served import served_target
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.head import TargetHead, load_head
from deepspec.targets.load import load_target
from deepspec.targets.quantization import same_quantization

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Extract what is not in a finished shard yet, on any number of ranks; then join the index.

    Raises InputRefused when the disk cannot hold the store or the responses are of another renderer or target, and
    UserError when the disk fills up or more than 1 % of the samples have unusable hidden states.
    """
    if config.features.path is not None:
        log.info("features: those in %s are used as they are (features.path)", config.features.path)
        return
    if not paths.makes_store(config):
        mode = config.features.mode
        log.info("features: computed while training (features.mode=%s), %s", mode, f"which fills "
                 f"{paths.features_dir(config)}" if mode == "hybrid" else "nothing to store")
        return
    responses = _responses(config)
    if artifacts.is_complete(paths.features_dir(config), store_fingerprint(config, responses)):
        log.info("features: up to date (%s)", paths.features_dir(config))
        return
    cache = paths.model_cache(config)
    if config.features.mode == "server":
        head = load_head(config.target, device=distributed.device(), cache_dir=cache)
        with served_target(config, head) as served:
            build = plan_store(config, head, served_facts(config, served))
            finish_store(build, served, open_store(build))
            log.info("features: requests: %s", ", ".join(f"{count} to {url}" for url, count in
                                                         served.requests().items()))
        return
    target = load_target(config.target, device=distributed.device(), cache_dir=cache)
    build = plan_store(config, target)
    finish_store(build, target, open_store(build))


def served_facts(config: Config, served: ServedTarget) -> dict[str, Any]:
    """What a store remembers of the engine that made it: a drafter is best on what its features were made by."""
    told, said = config.features.server.quantization, served.facts.get("engine_quantization")
    if told and said and not same_quantization(told, said):
        raise InputRefused(f"features.server.quantization={told}, but the server of {served.facts.get('model')} says "
                           f"its weights are {said}. Correct the option, or point features.server.servers at the "
                           "right one.")
    return served.facts | {"quantization": told or said, "dtype": config.target.dtype}


@dataclass(frozen=True)
class StoreBuild:
    """A store to be made, and everything it is made from."""

    config: Config
    directory: Path
    header: StoreHeader
    work: Work
    fingerprint: str
    responses: artifacts.Manifest
    served: Optional[dict[str, Any]] = None  # the engine, where one computes them


def plan_store(config: Config, target: FrozenTarget | TargetHead,
               served: Optional[dict[str, Any]] = None) -> StoreBuild:
    """The store of these options. Raises InputRefused for responses of another renderer or target."""
    responses = _responses(config)
    work = Work({
        split: load_samples(paths.responses_dir(config), split, config.data.max_length,
                            vocab_size=target.spec.vocab_size, mask_token_id=config.target.mask_token_id)
        for split in SPLITS
    })
    header = _header(config, target, responses)
    return StoreBuild(config, paths.features_dir(config), header, work, store_fingerprint(config, responses), responses,
                      served)


def open_store(build: StoreBuild) -> Rendezvous:
    """Begin or continue a store: disk checked, manifest written, shards that are not whole removed. Collective."""
    meeting = Rendezvous(build.directory, "features")
    needed = _checked_bytes(build) if meeting.rank == 0 else 0
    meeting.start(lambda: _prepare(build, meeting, needed))
    return meeting


def finish_store(build: StoreBuild, target: FrozenTarget | ServedTarget, meeting: Rendezvous, *, tokens: int = 0,
                 seconds: float = 0.0) -> None:
    """Extract what is in no finished shard, dealt over the ranks, and join the index. Collective.

    All ranks see the same finished shards when this is called. ``tokens`` of this rank were extracted before, in
    ``seconds``.
    """
    result = _extract(build, target, meeting)
    meeting.finish(result | {"tokens": result["tokens"] + tokens, "seconds": result["seconds"] + seconds})
    if meeting.rank == 0:
        _conclude(build.directory, build.work, meeting.collect())
    else:
        wait_for(lambda: artifacts.is_complete(build.directory, build.fingerprint),
                 lambda: "features: waiting for rank 0")
    meeting.end()


def _responses(config: Config) -> artifacts.Manifest:
    return artifacts.require_complete(paths.responses_dir(config), "Responses", "data_prep/generate_responses.py")


def store_fingerprint(config: Config, responses: artifacts.Manifest) -> str:
    """Hash of everything that decides the content of a store made from ``responses``."""
    return artifacts.canonical_hash({"key": paths.features_key(config), "responses": _identity(responses),
                                     "store_version": STORE_VERSION})


def _identity(responses: artifacts.Manifest) -> str:
    return artifacts.canonical_hash(responses.files)  # by content: answers made again may be the same


def _header(config: Config, target: FrozenTarget | TargetHead, responses: artifacts.Manifest) -> StoreHeader:
    renderer = Renderer(target.tokenizer, config.target.thinking, config.target.name)
    for name, now in (("renderer_hash", renderer.hash), ("target_fingerprint", target.fingerprint)):
        made_with = responses.facts.get(name)
        if made_with is not None and made_with != now:
            raise InputRefused(
                f"{paths.responses_dir(config)}: the responses were made with {name}={made_with}, but it is {now} now. "
                f"Delete that folder and make them again with: data_prep/generate_responses.py"
            )
    return StoreHeader(
        target_fingerprint=target.fingerprint, renderer_hash=renderer.hash,
        responses_fingerprint=_identity(responses),
        layers=tuple(target.feature_layers), hidden_size=target.spec.hidden_size, codec=config.features.codec,
        source_dtype=str(target.dtype).removeprefix("torch."), convention=convention_of(target.family.streams),
    )


def _checked_bytes(build: StoreBuild) -> int:
    """Bytes of the whole store, for which there is room."""
    directory, header, work = build.directory, build.header, build.work
    needed = estimate_bytes(header, chain.from_iterable(work.sets.values()))
    there = sum(path.stat().st_size for path in directory.glob("shard-*.bin")) if directory.exists() else 0
    log.info("features: %d samples, %s", len(work), describe_estimate(header, needed))
    require_disk(directory, max(0, needed - there))
    return needed


def _begin(build: StoreBuild, needed: int) -> None:
    artifacts.begin(build.directory, PRODUCER, build.fingerprint, inputs={"responses": build.responses.fingerprint},
                    seed=build.config.run.seed, config=paths.features_key(build.config),
                    facts={"header": asdict(build.header), "estimated_bytes": needed}
                    | ({"served": build.served} if build.served else {}))


def _prepare(build: StoreBuild, meeting: Rendezvous, needed: int) -> None:
    if meeting.rank == 0:
        _begin(build, needed)
    clean_shards(build.directory, build.header, rank=meeting.rank, world_size=meeting.world_size)
    for path in build.directory.glob("quarantine-*.jsonl"):
        if int(path.stem.split("-")[-1]) % meeting.world_size == meeting.rank:
            path.unlink(missing_ok=True)


def _encoded(target: FrozenTarget | ServedTarget, batches: Iterable[list[Sample]]) -> Iterator[FeatureSample | Refusal]:
    if isinstance(target, ServedTarget):
        yield from target.stream(chain.from_iterable(batches))
        return
    checked = False
    for batch in batches:
        for item in encode_samples(target, batch):
            # In every build and on every rank: what is about to be stored gives the model's own logits. A sample that
            # overflows says nothing of that; the writer sets it aside.
            if not checked and bool(item.last_hidden.isfinite().all()):
                target.check_sample(item.sample.input_ids, item.last_hidden)
                checked = True
            yield item


def _extract(build: StoreBuild, target: FrozenTarget | ServedTarget, meeting: Rendezvous) -> dict[str, Any]:
    """This rank's batches. They are dealt over all samples, finished or not, so that every rank deals alike."""
    directory, work, config = build.directory, build.work, build.config
    done = finished_samples(directory)
    ids, lengths = work.ids, work.lengths
    batches = work.batches(config.features.token_budget)[meeting.rank::meeting.world_size]
    todo = [[index for index in batch if ids[index] not in done] for batch in batches]
    if done:
        log.info("features: %d of %d samples are in finished shards", len(done), len(ids))
    splits = {ids[index]: work.get(index)[0] for batch in todo for index in batch}
    tokens = {ids[index]: lengths[index] for batch in todo for index in batch}
    writer = FeatureWriter(directory, build.header, shard_bytes=config.features.shard_megabytes * 2**20,
                           rank=meeting.rank)
    with Quarantine(directory, meeting.rank, len(work)) as quarantine, \
            Progress("features", len(splits), "samples") as progress:
        samples = ([work.get(index)[1] for index in batch] for batch in todo if batch)
        try:
            for item in _encoded(target, samples):
                name = item.sample_id if isinstance(item, Refusal) else item.sample.sample_id
                try:
                    if isinstance(item, Refusal):
                        raise BadFeatures(f"sample {name!r}: {item.reason}")
                    writer.write(item.sample, splits[name], item.features, item.last_hidden)
                    progress.add(tokens[name])
                except BadFeatures as error:
                    quarantine.add(name, error)
                    progress.add(0, failed=True)
        except UserError:
            with contextlib.suppress(UserError):  # what is there stays, whatever ended this
                writer.close()
            raise
        writer.close()
    return {"samples": writer.samples, "tokens": progress.tokens, "seconds": progress.seconds,
            "quarantined": quarantine.count}


def _conclude(directory: Path, work: Work, results: list[dict[str, Any]]) -> None:
    aside = {
        row["sample_id"] for path in sorted(directory.glob("quarantine-*.jsonl")) for _, row in read_rows(path)
    }
    if len(aside) > allowed_aside(len(work)):
        raise UserError(f"{directory}: {len(aside)} of {len(work)} samples have unusable hidden states, more than "
                        f"{QUARANTINE_LIMIT:.0%}. They are listed in quarantine-*.jsonl; run {COMMAND} again when the "
                        "cause is mended.")
    for path in directory.glob("quarantine-*.jsonl"):
        if not path.stat().st_size:
            path.unlink()
    shards = join_index(directory, work.ids, aside)
    manifest = artifacts.read_manifest(directory)
    assert manifest is not None, "begun by this stage"
    seconds = max(float(result["seconds"]) for result in results)
    facts = {
        "shards": shards, "quarantined": sorted(aside), "tokens": sum(work.lengths),
        "bytes": sum(shard["bytes"] for shard in shards.values()),
        "samples": {split: len(samples) for split, samples in work.sets.items()},
        "dropped": {split: samples.dropped for split, samples in work.sets.items()},
        "tokens_per_second": round(sum(int(result["tokens"]) for result in results) / seconds, 2),
    }
    artifacts.complete(directory, manifest, [INDEX], facts)
    log.info("features: %d samples, %d tokens, %s in %d shards%s, in %s", len(work) - len(aside), facts["tokens"],
             human_bytes(facts["bytes"]), len(shards), f", {len(aside)} set aside" if aside else "", directory)
