"""Stage callables: Arrow tables in, Arrow tables out, no Ray. `pipeline.flow` puts them in line."""
