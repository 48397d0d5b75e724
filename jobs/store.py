"""`headrace store`: look into a feature store, and look after it."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from jobs.refusals import refusals
from pipeline.config import Store, load_config
from pipeline.errors import ConfigError
from pipeline.features.inspect import check_is_store, describe_record, describe_store, find_record
from pipeline.features.select import RecordFilter, listed_records
from pipeline.features.store import FeatureStore
from pipeline.stages.opened_store import open_store

app = typer.Typer(help="Look into a feature store, and look after it.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Where = Annotated[str, typer.Argument(metavar="STORE", help="A store's folder or URL, or the YAML file of a job.")]


class Form(enum.StrEnum):
    """Formats of an export."""

    safetensors = "safetensors"
    parquet = "parquet"
    arrow = "arrow"


def opened(where: str) -> FeatureStore:
    """The store at `where`, or that of the job in the file `where`. Raises `ConfigError` when there is none."""
    if where.endswith((".yaml", ".yml")):
        section = load_config(where, []).anchored().store
        store = open_store(section)
    else:
        store = FeatureStore(where)
    check_is_store(store)
    return store


def _filter(
    tenant: str | None = None,
    content: str | None = None,
    weights: str | None = None,
    processor: str | None = None,
    decode: str | None = None,
    resize: str | None = None,
) -> RecordFilter:
    return RecordFilter(
        tenant=tenant,
        content=content,
        weights=weights,
        processor=processor,
        decode_backend=decode,
        resize_backend=resize,
    )


@app.command()
def stat(where: Where, json_: Json = False) -> None:
    """Print what a store holds: by tier shards, records and bytes, and records by tenant and by term; what is open."""
    with refusals():
        told = describe_store(opened(where))
    if json_:
        typer.echo(json.dumps(told, indent=2))
        return
    for name, tier in told["tiers"].items():
        typer.echo(f"{name}: {tier['records']:,} records of {tier['bytes']:,} bytes in {tier['shards']:,} shards")
        typer.echo(f"  making them took workers {tier['made_seconds']:,.1f} s")
        typer.echo(f"  a record has {tier['least']:,} to {tier['most']:,} bytes, {tier['median']:,} in the median")
        for term, counts in tier["by"].items():
            for value, count in counts.items():
                typer.echo(f"  {term} {value or '(none)'}: {count:,}")
    for shard, alive in told["open_shards"].items():
        typer.echo(f"open on this machine: {shard}, {'being written' if alive else 'its writer is gone'}")


@app.command("ls")
def list_(
    where: Where,
    tenant: Annotated[str | None, typer.Option(help="Whose records.")] = None,
    content: Annotated[
        str | None, typer.Option(help="Of which content, such as sha256:…; * stands for anything.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Of a model, by the digest of its weights.")] = None,
    shard: Annotated[str | None, typer.Option(help="In which shard.")] = None,
    frames: Annotated[bool, typer.Option(help="Decoded frames instead of features.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="No more than so many.")] = None,
    json_: Json = False,
) -> None:
    """List records, a line each: key, tenant, content, grid, feature length, bytes, shard."""
    with refusals():
        store = opened(where)
        found = listed_records(store.frames if frames else store, _filter(tenant, content, weights), shard)
        for record in itertools.islice(found, limit):
            if json_:
                told = {**dataclasses.asdict(record), "created": record.created.isoformat()}
                typer.echo(json.dumps(told, sort_keys=True))
                continue
            grid = "x".join(map(str, record.grid))
            facts = (record.key, record.tenant or "-", record.terms.get("content", "-"), grid)
            typer.echo("  ".join([*facts, f"{record.feature_length:,}", f"{record.num_bytes:,} bytes", record.shard]))


@app.command()
def get(
    where: Where,
    key: Annotated[str, typer.Argument(help="A record's key, or as much of its beginning as no other has.")],
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Where to write it, as safetensors.")] = None,
) -> None:
    """Print what one record is: the terms of its key, geometry, placeholder, and each tensor in numbers."""
    with refusals():
        shard, record, data = find_record(opened(where), key)
    typer.echo(json.dumps({"shard": shard, "bytes": len(data), **describe_record(record)}, indent=2))
    if output is not None:
        Path(output).write_bytes(data)


@app.command()
def export(
    where: Where,
    output: Annotated[str, typer.Option(help="The file, or for safetensors the folder, to make.")],
    format_: Annotated[Form, typer.Option("--format", help="A folder of files, or one file.")] = Form.parquet,
    tenant: Annotated[str | None, typer.Option(help="Whose records.")] = None,
    content: Annotated[str | None, typer.Option(help="Of which content; * stands for anything.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of a model, by the digest of its weights.")] = None,
    frames: Annotated[bool, typer.Option(help="Decoded frames instead of features.")] = False,
) -> None:
    """Write records for others to read: safetensors files, a Parquet file, or an Arrow file."""
    with refusals():
        from pipeline.features.export import export as write

        store = opened(where)
        count = write(store.frames if frames else store, _filter(tenant, content, weights), format_.value, output)
    typer.echo(f"{count} records in {output}")


@app.command()
def invalidate(
    where: Where,
    weights: Annotated[str | None, typer.Option(help="Features of these weights; frames stay.")] = None,
    processor: Annotated[str | None, typer.Option(help="Features of this processor; frames stay.")] = None,
    decode: Annotated[str | None, typer.Option(help="Frames of this decoder, and features; * for anything.")] = None,
    resize: Annotated[str | None, typer.Option(help="Frames resized by this, and features; * for anything.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Drop it, instead of showing it.")] = False,
) -> None:
    """Show what is built on a model, a processor, a decoder or a resizer, by tier; with --yes, drop exactly that."""
    with refusals():
        from pipeline.features.select import drop_records, select_tiers

        chosen = _filter(weights=weights, processor=processor, decode=decode, resize=resize)
        if chosen.is_empty:
            raise ConfigError("say what is no longer valid: --weights, --processor, --decode or --resize")
        store = opened(where)
        tiers = drop_records(store, chosen) if yes else select_tiers(store, chosen)
    for tier in tiers:
        what = f"{tier.records:,} records of {tier.num_bytes:,} bytes in {tier.shards:,} shards"
        typer.echo(f"{tier.name}: {what}{' dropped' if yes else ''}")
    if not yes:
        typer.echo("nothing was changed; --yes drops this")


@app.command()
def verify(where: Where) -> None:
    """Read every record and look for what is damaged, missing or left over. Exit code 1 when something is."""
    found = 0
    with refusals():
        from pipeline.features.verify import verify as look_over

        for finding in look_over(opened(where)):
            typer.echo(str(finding))
            found += 1
    typer.echo(f"{found} findings" if found else "all is as it has to be")
    raise typer.Exit(int(bool(found)))


@app.command()
def repair(where: Where) -> None:
    """Put right what `verify` finds: records that are lost are encoded again when they are next asked for."""
    with refusals():
        from pipeline.features.verify import repair as put_right

        done = put_right(opened(where))
    for line in done or ["nothing to repair"]:
        typer.echo(line)


@app.command()
def compact(where: Where) -> None:
    """Put small shards together, and leave out records that are there twice."""
    with refusals():
        from pipeline.features.verify import compact as put_together

        made = put_together(opened(where))
    typer.echo(f"{len(made)} shards made, of {sum(shard.num_records for shard in made)} records")


@app.command()
def evict(
    where: Where,
    ttl: Annotated[str | None, typer.Option(help="Records older than this, such as 30d or 12h.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="And as many others as it takes until the store has no more than this.")
    ] = None,
    frames_max_bytes: Annotated[
        int | None, typer.Option(min=1, help="Of decoded frames, until these have no more than this.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Drop them, instead of showing how many.")] = False,
) -> None:
    """Show what is too old or too much, what answers fewest questions first; with --yes, drop it."""
    with refusals():
        from pipeline.features.evict import choose_evictions
        from pipeline.features.evict import evict as let_go

        if ttl is None and max_bytes is None and frames_max_bytes is None:
            raise ConfigError("say what the store is to be brought down to: --ttl, --max-bytes, --frames-max-bytes")
        store = opened(where)
        bounds: dict[str, Any] = {"ttl": _age(ttl), "max_bytes": max_bytes, "frames_max_bytes": frames_max_bytes}
        found = let_go(store, **bounds) if yes else [told for told, _ in choose_evictions(store, **bounds)]
    for tier in found:
        what = f"{tier.expired:,} records too old and {tier.evicted:,} too many, {tier.num_bytes:,} bytes"
        typer.echo(f"{tier.tier}: {what}{' dropped' if yes else ''}")
    if not yes:
        typer.echo("nothing was changed; --yes drops them")


def _age(text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        seconds = Store.model_validate({"ttl": text}).ttl
    except ValidationError:
        raise ConfigError(f"--ttl takes a time such as 30d, 12h or seconds, got {text!r}") from None
    return None if seconds is None else timedelta(seconds=seconds)


@app.command()
def delete(
    config: Annotated[str, typer.Argument(help="The YAML file of a job: its store, output folder and vector stores.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one value.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose items; alone, all of them.")] = None,
    item: Annotated[list[str] | None, typer.Option(help="An item, by its id; may be given again.")] = None,
    content: Annotated[str | None, typer.Option(help="All of one content, such as sha256:….")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete it, instead of showing it.")] = False,
    receipt: Annotated[str | None, typer.Option(metavar="FILE", help="Where to write the receipt.")] = None,
) -> None:
    """Delete what was derived from items: features, frames, vectors, rows of finished runs. Exit 1 if some is left."""
    with refusals():
        from pipeline.deletion import Selection, find_derived
        from pipeline.deletion import delete as forget

        loaded = load_config(config, set_ or []).anchored()
        section = loaded.store
        store = open_store(section)
        selection = Selection(tenant=tenant, item_ids=tuple(item or ()), content=content)
        found = (forget if yes else find_derived)(loaded, store, selection)
    told = json.dumps(found.to_json(), indent=2)
    typer.echo(told)
    if not yes:
        typer.echo("nothing was changed; --yes deletes this, and the points of the vector stores")
    elif receipt is not None:
        Path(receipt).write_text(told + "\n", encoding="utf-8")
