"""Command line of feature stores.

    python -m deepspec.data.features inspect DIR
    python -m deepspec.data.features verify DIR
    python -m deepspec.data.features repair DIR [--responses DIR] [--target FOLDER] [--remove]
    python -m deepspec.data.features import FORMAT SOURCE DIR [--layers IDS] [--target FOLDER] [--codec NAME] ...

Exit codes: 0 done, 2 wrong usage, 3 damaged or refused, 1 anything else.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Optional, Sequence

from deepspec.data.feature_codec import CODECS
from deepspec.data.feature_format import human_bytes
from deepspec.data.feature_store import REPAIR
from deepspec.data.features.cache import FORMATS, SourceOptions
from deepspec.data.features.check import find_damage, read_catalog
from deepspec.data.features.importing import import_cache
from deepspec.data.features.remake import from_target
from deepspec.data.features.repair import remove_damaged, repair
from deepspec.data.features.summary import describe
from deepspec.errors import ConfigError, InputRefused, UserError

log = logging.getLogger("deepspec.data.features")


def _inspect(arguments: argparse.Namespace) -> int:
    log.info("%s", describe(read_catalog(arguments.directory)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    catalog = read_catalog(arguments.directory)
    damage = list(find_damage(catalog))
    for item in damage:
        log.error("%s/%s", arguments.directory, item)
    if damage:
        samples = sum(len(item.sample_ids) for item in damage)
        log.error("%d files damaged, %d samples. Repair: %s %s", len(damage), samples, REPAIR, arguments.directory)
        return InputRefused.exit_code
    log.info("%s: every byte of %d shards is as it was written", arguments.directory, len(catalog.shards))
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    if arguments.remove:
        if not remove_damaged(arguments.directory):
            log.info("%s: nothing is damaged", arguments.directory)
        return 0
    done = repair(arguments.directory, lambda catalog: from_target(
        catalog, responses=arguments.responses, target_path=arguments.target))
    log.info("%s: %s", arguments.directory,
             f"{len(done.damage)} files repaired, {done.samples} samples made again" if done.damage else
             "nothing is damaged")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    options = SourceOptions(
        format=arguments.format, directory=str(arguments.source.resolve()), layers=_layers(arguments.layers),
        target=arguments.target, dtype=arguments.dtype, domain=arguments.domain, held_out=arguments.held_out,
    )
    done = import_cache(options, arguments.directory, codec=arguments.codec,
                        shard_bytes=arguments.shard_megabytes * 2**20)
    log.info("%s: %d samples, %s; left out: %d without a place for a block, %d with unusable numbers%s",
             arguments.directory, done.samples, human_bytes(done.bytes), done.no_anchors, done.quarantined,
             "" if options.target else ". Not compared with any target: give --target to do so")
    return 0


def _layers(text: Optional[str]) -> Optional[tuple[int, ...]]:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers={text} must be ids separated by commas, for example 2,10,18.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspec.data.features", description="Look after feature stores.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, action, text in (("inspect", _inspect, "what a store holds"), ("verify", _verify, "check every byte"),
                               ("repair", _repair, "make damaged samples again")):
        one = actions.add_parser(name, help=text)
        one.add_argument("directory", type=Path)
        one.set_defaults(run=action)
    one.add_argument("--responses", type=Path, help="folder of the responses, if it moved")
    one.add_argument("--target", help="folder of the target, if it moved")
    one.add_argument("--remove", action="store_true", help="only delete what is damaged; the next extraction makes it")
    one = actions.add_parser("import", help="take over the cache of another project")
    one.add_argument("format", choices=FORMATS)
    one.add_argument("source", type=Path, help="folder of the cache")
    one.add_argument("directory", type=Path, help="folder of the store to make")
    one.add_argument("--layers", help="ids of the layers in the cache's own convention, separated by commas")
    one.add_argument("--target", help="folder of the target, to compare the first sample with")
    one.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the target")
    one.add_argument("--codec", default="int8", choices=CODECS)
    one.add_argument("--domain", default="imported")
    one.add_argument("--held-out", type=float, default=0.02, help="share of samples to hold out")
    one.add_argument("--shard-megabytes", type=int, default=512)
    one.set_defaults(run=_import)
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one action; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except UserError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
