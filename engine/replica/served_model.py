"""A loaded model with all that a replica builds around it, and what it says of itself. It knows no connections."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.images.image_worker import ImageWorker
from engine.protocol.frames import PROTOCOL_OLDEST, PROTOCOL_VERSION, Hello
from engine.protocol.specs import ReplicaSpec
from engine.replica.grammars import masked_sampler
from engine.replica.handovers import Handovers, open_handovers
from engine.replica.load_reports import LoadReports
from engine.replica.open_scheduler import max_sequence_tokens, open_scheduler, open_validator
from engine.replica.public_prefixes import public_prefixes, publish_prefixes
from engine.replica.sleep_wake import SleepController
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.sequences.validation import RequestValidator
from engine.step.executor import LoadedModel
from engine.structured_output.manager import StructuredOutputManager


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a replica serves a model with; its public prefixes are computed.

    hello    is what every connection gets first.
    images   is None where the model takes none.
    reports  say who hears how full the scheduler is.
    """

    hello: Hello
    validator: RequestValidator
    scheduler: Scheduler | EncoderScheduler
    loop: StepLoop
    images: ImageWorker | None
    sleep: SleepController
    handovers: Handovers
    reports: LoadReports


def open_served_model(
    model: LoadedModel, spec: ReplicaSpec, grammars: StructuredOutputManager, clock: Callable[[], float]
) -> ServedModel:
    """Builds them around a model. The caller closes model, images and handovers. Raises InvalidPublicPrefix."""
    prefixes = public_prefixes(model, spec.model)
    tokens_max = max_sequence_tokens(model, sum(map(len, prefixes)))
    validator = open_validator(model, spec.model, tokens_max)
    scheduler = open_scheduler(model, spec.model, clock)
    sampler = masked_sampler(model, grammars.begin_masks)
    images = None if model.images is None else ImageWorker(model.images, model.compute_context)
    loop = StepLoop(model.executor, scheduler, model.memories, sampler, model.tier, model.exchange, images)
    publish_prefixes(loop, scheduler, [validator.public_sequence(prefix) for prefix in prefixes])
    kept_bytes = spec.model.kept_kv_bytes // model.devices
    staged_bytes = spec.model.handover_bytes if model.exchange is not None else 0
    handovers = open_handovers(model, spec, scheduler.intake, validator, clock)
    sleep = SleepController(
        model.sleeper, model.memories, scheduler, loop, kept_bytes, clock, staged_bytes, handovers.leave_device
    )
    paged = model.paged
    hello = Hello(
        protocol=PROTOCOL_OLDEST,
        model=spec.model.name,
        revision=model.revision,
        boot=str(spec.boot),
        pid=os.getpid(),
        context_tokens=tokens_max,
        vocabulary=model.executor.limits.vocabulary,
        block_tokens=paged.layout.block_tokens if paged is not None else 1,
        blocks=paged.layout.blocks if paged is not None else 0,
        newest_protocol=PROTOCOL_VERSION,
        digest=model.digest(Path(spec.model.folder)),
        handover=handovers.address,
        raises_epochs=True,
        image_tokens=0 if model.images is None else model.images.tokens,
        names_prefixes=scheduler.kv is not None,
        region=spec.region,
        polled=True,
        max_sequences=model.executor.limits.sequences,
    )
    return ServedModel(hello, validator, scheduler, loop, images, sleep, handovers, LoadReports())
