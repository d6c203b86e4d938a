"""Profiles from tables that others measured: Vidur, AIConfigurator, LLMServingSim."""

from exegpt.profiler.imports.aiconfigurator import aiconfigurator_profile
from exegpt.profiler.imports.llmservingsim import llmservingsim_profile
from exegpt.profiler.imports.vidur import vidur_profile

__all__ = ["aiconfigurator_profile", "llmservingsim_profile", "vidur_profile"]
