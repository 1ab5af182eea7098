"""Facts that hosts report: hardware, samples of GPUs, lines of the kernel's log. Checked, frozen values.

Pure: `gpurun.node` finds the facts on the host, `gpurun.doctor` requests and judges them.
"""
