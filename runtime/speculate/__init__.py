"""Speculation: drafts of several tokens a step, verified so that nothing but the speed changes."""
