"""What hosts say of themselves: hardware, samples of GPUs, lines of the kernel's log. Checked, frozen values.

Pure: `gpurun.node` finds the facts on the host, `gpurun.doctor` asks for them and judges them.
"""
