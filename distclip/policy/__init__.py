"""Policies: how much may pass. From agreed norms to one coefficient per param group, the same bits on every rank."""

from __future__ import annotations

from distclip.policy.fixed import Decision, decide_fixed

__all__ = ["Decision", "decide_fixed"]
