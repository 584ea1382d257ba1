"""Planner and decode kernels, one file per job and library. They take tensors and own nothing."""
