"""What a feature store holds, in a few lines for people."""

from collections import Counter
from pathlib import Path

from deepspec.data.feature_format import INDEX, Record, human_bytes
from deepspec.data.features.cache import SOURCE
from deepspec.data.features.check import Catalog


def describe(catalog: Catalog) -> str:
    """Several lines. Looks at sizes only; damage inside a file is found by verify."""
    header, manifest = catalog.header, catalog.manifest
    records = [record for shard in catalog.shards.values() for record in shard or ()]
    tokens, size = sum(record.tokens for record in records), sum(_size(catalog, name) for name in catalog.shards)
    per_token = size / max(1, tokens)
    plain = (len(header.layers) + 1) * header.hidden_size * 2
    problems = suspects(catalog)
    lines = [
        ("store", f"{catalog.directory} ({manifest.status})"),
        ("target", f"{_target(catalog)}, fingerprint {header.target_fingerprint[:16]}, {header.source_dtype}"),
        ("layers", f"{', '.join(map(str, header.layers))} ({header.convention}); width {header.hidden_size}"),
        ("made by", _engine(catalog)),
        ("codec", header.codec),
        ("samples", f"{len(records)} ({_counted(records, 'split')}), {tokens} tokens, "
                    f"{sum(record.label_rows for record in records)} of them predict a label"),
        ("domains", _counted(records, "domain")),
        ("bytes", f"{human_bytes(size)} in {len(catalog.shards)} shards, {per_token:.0f} per token "
                  f"({per_token / plain:.1%} of {plain}, all layers and the last in bf16)"),
        ("renderer", header.renderer_hash), ("responses", header.responses_fingerprint),
        ("set aside", f"{len(catalog.quarantined)} samples with unusable numbers"),
        ("damaged", "; ".join(problems) if problems else "no file is missing or of another size (verify reads them)"),
    ]
    return "\n".join(f"{name:<10} {value}" for name, value in lines)


def suspects(catalog: Catalog) -> list[str]:
    """Files that are missing, of another size than they should be, or not listed."""
    indexed = catalog.order is not None or catalog.manifest.status != "complete"
    found = [] if indexed else [f"{INDEX}: missing or changed"]
    for name, records in catalog.shards.items():
        expected = catalog.manifest.facts.get("shards", {}).get(name, {}).get("bytes")
        size = _size(catalog, name)
        if records is None:
            found.append(f"{name}.json: cannot be read")
        elif expected is not None and size != expected:
            found.append(f"{name}.bin: {size} bytes, expected {expected}")
    return found


def _size(catalog: Catalog, name: str) -> int:
    path = catalog.directory / f"{name}.bin"
    return path.stat().st_size if path.exists() else 0


def _target(catalog: Catalog) -> str:
    config = catalog.manifest.config
    if SOURCE in config:
        source = config[SOURCE]
        return f"{Path(source['target']).name if source['target'] else 'unknown'} (imported from {source['format']})"
    responses = config.get("responses")
    return str(responses["target"]["name"]) if isinstance(responses, dict) else "unknown"


def _engine(catalog: Catalog) -> str:
    served = catalog.manifest.facts.get("served")
    if served is None:
        return "another project" if SOURCE in catalog.manifest.config else "the target itself"
    version, kind = served.get("engine_version"), served.get("quantization")
    return (f"{served['engine']}{f' {version}' if version else ''} serving {served.get('model')}, "
            f"{kind or 'not quantised as far as was said'}")


def _counted(records: list[Record], field: str) -> str:
    samples: Counter[str] = Counter(getattr(record, field) for record in records)
    tokens: Counter[str] = Counter()
    for record in records:
        tokens[getattr(record, field)] += record.tokens
    return ", ".join(f"{name} {count} ({tokens[name]} tokens)" for name, count in sorted(samples.items())) or "none"
