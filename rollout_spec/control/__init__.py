"""The decision how many draft tokens to speculate, pure: numpy only, no engine, no clock, no I/O."""
