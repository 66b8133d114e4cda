"""The first quarter of an hour on an accelerator: `scripts/on_gpu`.

`main` runs each section in a process of its own (`child`) and keeps what it records in one file (`results`); the
modules named in `sections` are what is measured, `goals` what is wanted, and `markdown` shows both.
"""
