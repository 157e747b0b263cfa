"""Parts of torch that tests/late_imports keeps out of ranks load once somebody asks for them."""

import sys

from harness import job_environment, run_command


def test_parts_load_when_asked_for_whole_or_by_a_module_in_them(tmp_path):
    code = (
        "import sys, torch\n"
        "part = torch.distributions\n"
        "assert type(part).__name__ == 'Part' and 'torch.distributions.normal' not in sys.modules\n"
        "import torch.distributions.constraints as constraints\n"
        "assert torch.distributions is part and part.constraints is constraints\n"
        "assert part.Normal(0.0, 1.0).sample().shape == ()\n"
        "from torch.ao.quantization import QConfig\n"
        "from torch.quantization import quantize\n"
        "assert torch.nn.quantized.Linear and torch.nn.intrinsic.ConvBn1d and torch.hub.load\n"
        "assert 'quantized' in dir(torch.nn) and torch.masked.masked_tensor\n"
        "assert torch.nn.qat.Linear and torch.nn.quantizable.LSTM"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, env=job_environment())
    assert done.returncode == 0, done.stderr
