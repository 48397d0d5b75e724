"""`headrace store`: look into a feature store, and look after it."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.refusals import refusals
from pipeline.config import load_config
from pipeline.features.store import FeatureStore

app = typer.Typer(help="Look into a feature store, and look after it.", no_args_is_help=True)
Where = Annotated[str, typer.Argument(metavar="STORE", help="A store's folder or URL, or the YAML file of a job.")]


def opened(where: str) -> FeatureStore:
    """The store at `where`, or that of the job in the file `where`. Raises `ConfigError` for a file that is none."""
    if not where.endswith((".yaml", ".yml")):
        return FeatureStore(where)
    store = load_config(where, []).anchored().store
    return FeatureStore(store.path, store.local_path, store.shard_bytes, store.shard_windows)


@app.command()
def stat(where: Where) -> None:
    """Print how many shards, records and bytes are sealed."""
    with refusals():
        shards = opened(where).sealed_shards()
    typer.echo(f"shards   {len(shards)}")
    typer.echo(f"records  {sum(shard.num_records for shard in shards)}")
    typer.echo(f"bytes    {sum(shard.num_bytes for shard in shards)}")


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
