"""Everything DeepSpeed: its final configuration, the engine, and the one place that scales a loss."""
