"""Wrong answers to zero3.number: 70 B parameters on 8 ranks."""

from wrong_answers import wrong

wrong("ZeRO-3 divides all 16 bytes by N", 16 * 70, mistake="counts as if nothing were sharded")
wrong("that is ZeRO-1", 4 * 70 + 12 * 70 / 8, mistake="divides the optimizer's part only")
wrong("the weights are divided by N, too", 2 * 70 + 14 * 70 / 8, mistake="leaves the weights whole, as ZeRO-2 does")
wrong("the fp32 master is missing", 12 * 70 / 8, mistake="counts 8 bytes of optimizer")
wrong("that is the weights' part", 2 * 70 / 8, mistake="counts the weights only")
