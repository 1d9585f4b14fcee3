"""Wrong answers to zero3.number: 70 B parameters on 8 ranks."""

from wrong_answers import wrong

wrong("ZeRO-3 divides all 16 bytes by N", 16 * 70, mistake="counts as if nothing were sharded")
wrong("that is ZeRO-1", 4 * 70 + 12 * 70 / 8, mistake="divides the optimizer's part only")
wrong("the weights are divided by N, too", 2 * 70 + 14 * 70 / 8, mistake="leaves the weights whole, as ZeRO-2 does")
wrong("the fp32 master is missing", 12 * 70 / 8, mistake="counts 8 bytes of optimizer")
wrong("that is the weights' part", 2 * 70 / 8, mistake="counts the weights only")
wrong("two moments are missing", 8 * 70 / 8, mistake="counts 4 bytes of optimizer, the master")
wrong("weights or gradients are missing", 14 * 70 / 8, mistake="counts no gradients")
wrong("2 bytes, not 4", 18 * 70 / 8, mistake="counts gradients in fp32")
wrong("the optimizer's 12 bytes are not", 12 * 70 + 4 * 70 / 8, mistake="leaves the optimizer's part whole")
wrong("the whole weights are counted as well", 2 * 70 + 16 * 70 / 8, mistake="adds the gathered weights")
wrong("its own part is 1/N", 16 * 70 * 7 / 8, mistake="counts what is sent, not what is held")
