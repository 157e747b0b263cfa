"""Parts of torch that tests/late_imports keeps out of ranks load once somebody asks for them."""

import sys

import pytest
from harness import LATE_IMPORTS, job_environment, run_command

ENVIRONMENT = job_environment({"PYTHONPATH": str(LATE_IMPORTS)})  # under ci/all_cases, too


def test_parts_load_when_asked_for_and_no_step_checkpoint_or_comparison_asks(tmp_path):
    code = (
        "import sys, torch, torch.utils.checkpoint as saved\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "for is_reentrant in (True, False):\n"
        "    y = saved.checkpoint(torch.sin, x, use_reentrant=is_reentrant)\n"
        "    torch.autograd.backward([y], [torch.ones(2)])\n"
        "assert torch.equal(x.grad, 2 * x.cos())\n"
        "torch.testing.assert_close(x, x + 1e-9)\n"
        "assert not {'sympy', 'torch._dynamo.eval_frame'} & set(sys.modules)\n"
        "part = torch.distributions\n"
        "assert type(part).__name__ == 'Part' and 'torch.distributions.normal' not in sys.modules\n"
        "import torch.distributions.constraints as constraints\n"
        "assert torch.distributions is part and part.constraints is constraints\n"
        "assert part.Normal(0.0, 1.0).sample().shape == ()\n"
        "kept_out = 'export func profiler nn.attention _higher_order_ops'.split()\n"
        "late = [type(sys.modules[f'torch.{name}']).__name__ for name in kept_out]\n"
        "assert late == ['Part', 'Package', 'Part', 'Part', 'Package'], late\n"
        "from torch.ao.quantization import QConfig\n"
        "from torch.quantization import quantize\n"
        "assert torch.nn.quantized.Linear and torch.nn.intrinsic.ConvBn1d and torch.hub.load\n"
        "assert 'quantized' in dir(torch.nn) and torch.masked.masked_tensor\n"
        "assert torch.nn.qat.Linear and torch.nn.quantizable.LSTM\n"
        "assert torch.equal(torch.vmap(torch.sin)(x), x.sin()) and torch.func.grad\n"
        "assert torch.nn.attention.SDPBackend\n"
        "assert torch.profiler.ProfilerActivity.CPU\n"
        "import unittest.mock\n"
        "with unittest.mock.patch.object(torch, 'sin', torch.cos):\n"
        "    assert torch.equal(torch.sin(x), x.cos())"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.at_length  # it loads what compiles
def test_what_is_kept_out_is_the_real_one_once_asked_for(tmp_path):
    code = (
        "import torch\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "torch.autograd.backward([x.sin()], [torch.ones(2)])\n"
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv, sym_eq, expect_true\n"
        "assert ShapeEnv().create_unbacked_symint\n"
        "assert torch._dynamo.config.recompile_limit > 0 and torch._dynamo.eval_frame\n"
        "assert sym_eq((2,), (2,)) is True and expect_true(True)\n"
        "torch.compile(torch.sin, backend='eager')(x)\n"
        "assert torch.cond(True, torch.sin, torch.cos, (x,)).shape == (2,)\n"
        "with torch.profiler.profile() as profile:\n"  # it loads what compiles, too
        "    torch.sin(x)\n"
        "assert any('sin' in event.name for event in profile.events())\n"
        "assert torch.export.export(torch.nn.Linear(2, 2), (x,)).module()(x).shape == (2,)\n"
        "import torch.distributed as dist, torch.distributed.tensor as tensor\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "mesh = dist.init_device_mesh('cpu', (1,))\n"
        "of_one = tensor.distribute_tensor(x.detach(), mesh)\n"
        "torch.testing.assert_close(of_one, of_one)\n"
        "try:\n"
        "    torch.testing.assert_close(of_one, x)\n"
        "except TypeError as error:\n"
        "    assert 'DTensor' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('a DTensor was compared as if it were none')\n"
        "dist.destroy_process_group()"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
