"""Attacks on a run's own noise and releases: lower bounds on ε that would refute a promise."""

from fedcgd.audit.audit import AuditResult, Release, audit_canaries, audit_plan
from fedcgd.audit.paths import server_release

__all__ = ["AuditResult", "Release", "audit_canaries", "audit_plan", "server_release"]
