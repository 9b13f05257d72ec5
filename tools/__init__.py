"""Scripts around the training: each runs alone. (This file keeps PyPI's package `tools` from being taken for them.)"""
