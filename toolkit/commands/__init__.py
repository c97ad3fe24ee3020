"""The commands of `omnidraft-npu`, one module each."""
