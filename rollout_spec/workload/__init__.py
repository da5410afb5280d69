"""What a rollout generates: prompts with checkable answers, published response-length distributions, files."""

from rollout_spec.workload.lengths import PROFILES, LengthSummary, describe, length_profile, sample_lengths, scaled_cap
from rollout_spec.workload.prompts import FAMILIES, Prompt, check_answer, generate_prompts
from rollout_spec.workload.workload import Group, Workload, build_workload, read_groups

__all__ = [
    "FAMILIES",
    "PROFILES",
    "Group",
    "LengthSummary",
    "Prompt",
    "Workload",
    "build_workload",
    "check_answer",
    "describe",
    "generate_prompts",
    "length_profile",
    "read_groups",
    "sample_lengths",
    "scaled_cap",
]
