"""What people use from Python, for type checkers: `__init__` loads it when it is used."""

from gpurun.api.asking import cancel as cancel
from gpurun.api.asking import job as job
from gpurun.api.asking import jobs as jobs
from gpurun.api.asking import map as map
from gpurun.api.asking import submit as submit
from gpurun.api.job import Job as Job
from gpurun.api.job import NoResult as NoResult
from gpurun.api.job import RemoteError as RemoteError

__version__: str
