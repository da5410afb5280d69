"""The only room that imports vLLM: scheduler plug-in, drafters, worker extension, launch, compatibility."""
