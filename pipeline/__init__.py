"""headrace: offline batch multimodal processing on Ray Data. `pipeline.flow` is the line; start reading there."""
