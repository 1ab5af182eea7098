"""The JSON documents that commands print. `SHAPES` maps each command to its documents.

`make reference` generates docs/reference/json.md from these types. Tests compare what commands print with these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.cli.shapes import accounts, hosts, jobs
from gpurun.cli.shapes.accounts import (
    ChangesShape,
    CordonShape,
    DrainShape,
    InventoryListShape,
    InventoryShape,
    TrustShape,
    ValidateShape,
)
from gpurun.lab.lab import LabStatus
from gpurun.simulate.report import Report

SHAPES: Mapping[str, tuple[Any, ...]] = {
    "submit": (jobs.SubmittedShape, jobs.PlanShape),
    "validate": (jobs.RecipeCheckShape,),
    "sweep run": (accounts.SweepStartedShape, jobs.PlanShape),
    "sweep status": (accounts.SweepsShape, accounts.SweepShape),
    "sweep best": (accounts.BestTrialShape,),
    "sweep table": (accounts.SweepShape,),
    "sweep stop": (accounts.SweepShape,),
    "sweep resume": (accounts.SweepShape,),
    "scale run": (accounts.CampaignShape, jobs.PlanShape),
    "scale list": (accounts.CampaignsShape,),
    "scale show": (accounts.CampaignShape,),
    "scale report": (accounts.CampaignFilesShape,),
    "status": (jobs.StatusShape,),
    "queue": (jobs.QueueShape,),
    "why": (jobs.WhyShape,),
    "logs": (jobs.LogLineShape,),
    "events": (jobs.EventShape,),
    "cancel": (jobs.JobsShape,),
    "requeue": (jobs.JobsShape,),
    "wait": (jobs.JobsShape,),
    "outputs": (jobs.OutputsShape,),
    "show": (jobs.ShowShape,),
    "rerun": (jobs.SubmittedShape,),
    "diff": (jobs.DiffShape,),
    "history": (accounts.HistoryShape,),
    "report": (accounts.ReportShape,),
    "du": (jobs.DiskShape, hosts.CachesSizeShape),
    "prune": (jobs.PruneShape, hosts.CachesPruneShape),
    "doctor": (hosts.DoctorShape,),
    "bench": (hosts.BenchShape,),
    "ship": (hosts.ShipShape, hosts.ShipPlanShape),
    "images": (hosts.ImagesShape,),
    "data list": (hosts.DataListShape,),
    "data stage": (hosts.StageShape,),
    "data evict": (hosts.EvictShape,),
    "simulate": (Report,),
    "inventory list": (InventoryListShape,),
    "inventory show": (InventoryShape, InventoryListShape),
    "inventory validate": (ValidateShape,),
    "inventory probe": (hosts.ProbeShape,),
    "inventory diff": (ChangesShape,),
    "inventory cordon": (CordonShape,),
    "inventory drain": (DrainShape,),
    "inventory uncordon": (CordonShape,),
    "inventory trust": (TrustShape,),
    "recover": (accounts.RecoverShape,),
    "audit": (accounts.AuditShape,),
    "config view": (accounts.ConfigShape,),
    "version": (accounts.VersionShape,),
    "lab status": (LabStatus,),
}
"""Command → the documents that it may print, the usual one first."""
