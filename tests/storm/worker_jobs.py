"""What `subetha worker` imports in the storms: their jobs, with the diary and the time that the environment names."""

import os

from jobs import Diary, register_jobs

register_jobs(Diary(os.environ["SUBETHA_STORM_RUNS"]), float(os.environ["SUBETHA_STORM_JOB_SECONDS"]))
