"""Ops: what the model computes, in plain torch, with implementations beside each meaning."""
