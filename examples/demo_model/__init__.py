"""The demonstration model: a small trained mixture of experts, and the scripts that made it."""

from pathlib import Path

WEIGHTS = Path(__file__).with_name("weights")
