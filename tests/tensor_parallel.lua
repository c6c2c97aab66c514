-- tensor_parallel - a GPT over two tp ranks is the hand-written split of tests/reference_tensor.py:
-- what every layer gives on each rank, the loss, each rank's gradients.
--
--     rille -n 2 tests/tensor_parallel.lua
local rille <const> = require "rille"
local check <const> = require "tests.check"
local pipelines <const> = require "tests.pipelines"
local core <const> = rille.core
local nn <const> = rille.nn

local golden <const> = rille.load "tests/golden/tensor_parallel.safetensors"
local VOCAB <const>, WIDTH <const>, HEADS <const>, HIDDEN <const>, T <const> = 11, 8, 4, 12, 6
local LAYERS <const>, RANKS <const>, SAMPLES <const> = 2, 2, 3

-- ---- the model of the reference

local Block = nn.class "Block"

function Block:init(style, dtype)
  local gated = style == "swiglu"
  local norm = gated and nn.RMSNorm or nn.LayerNorm
  self.norm1 = norm { WIDTH, dtype = dtype }
  self.attn = nn.Attention { WIDTH, HEADS, kv_heads = gated and 1 or 2, causal = true,
    rotary = gated, bias = not gated, dtype = dtype }
  self.norm2 = norm { WIDTH, dtype = dtype }
  self.mlp = nn.MLP { WIDTH, HIDDEN, act = style, bias = not gated, dtype = dtype }
end

function Block:forward(x)
  x = x + self.attn(self.norm1(x))
  return x + self.mlp(self.norm2(x))
end

local function model_of(style, dtype)
  local gated = style == "swiglu"
  return nn.Sequential {
    { "wte", nn.TokenEmbedding { VOCAB, WIDTH, positions = not gated and T or nil,
      dtype = dtype } },
    { "h", nn.Repeat(LAYERS, function() return Block(style, dtype) end) },
    { "ln_f", (gated and nn.RMSNorm or nn.LayerNorm) { WIDTH, dtype = dtype } },
    { "head", nn.Linear { WIDTH, VOCAB, bias = false, tied = "wte.weight", dtype = dtype } },
  }
end

-- The reference's tensors whose names begin so, by the rest of the name.
local function under(prefix)
  local list = {}
  for name, tensor in pairs(golden) do
    if name:sub(1, #prefix) == prefix then list[name:sub(#prefix + 1)] = tensor end
  end
  return list
end

-- ---- comparing

local function largest(tensor) return tensor:numel() > 0 and tensor:abs():max():item() or 0 end

-- Fails unless `have` is `want`; what it has more of along `dim` is padding and is not looked at.
local function same(name, have, want, dim, tolerance)
  have = have:detach():to "f64"
  local n = want:size(dim)
  check.ok(have:size(dim) >= n, ("%s has %d entries, not %d"):format(name, have:size(dim), n))
  check.equal({ have:slice(dim, 0, n):shape() }, { want:shape() }, name .. "'s shape")
  local error = largest(have:slice(dim, 0, n) - want)
  check.ok(error <= tolerance, ("%s differs by %.3g (at most %.3g)"):format(name, error, tolerance))
end

-- What the layers of the reference's list give in the latest forward pass, by path.
local function listen(model, paths)
  local outputs = {}
  for path in pairs(paths) do
    model:on(path, function(_, y)
      outputs[path] = rille.no_grad(function() return y:clone():keep() end)
    end)
  end
  return outputs
end

-- This rank's part along time of an output, where layers have it cut.
local function part_of(want, path, rank, sequence)
  local is_cut = path == "head" or path:find "qkv$" or path:find "gate$" or path:find "up$"
  if not sequence or is_cut then return want end
  return want:slice(1, rank * T // RANKS, (rank + 1) * T // RANKS)
end

local function compare(team, style, dtype, sequence)
  local precision = dtype == "f64" and 1e-13 or 1e-6
  local rank = team:rank()
  local outputs, grads = under(("%s.out.%d."):format(style, rank)),
    under(("%s.grad.%d."):format(style, rank))
  local model = model_of(style, dtype)
  model:load_state_dict(under(style .. ".weight."))
  local pipe = rille.Pipeline { model = model, loss = nn.cross_entropy,
    batch = { global = SAMPLES, micro = SAMPLES },
    parallel = { comm = team, tp = RANKS, sequence_parallel = sequence } }
  local given = listen(model, outputs)
  pipe:optimizer { "sgd", lr = 0 }
  local r = pipe:step { golden[style .. ".ids"], golden[style .. ".targets"] }
  check.near(r.loss, golden[style .. ".loss"]:item(), 10 * precision, "the loss")
  for path, want in pairs(outputs) do
    check.ok(given[path], path .. " gave nothing")
    same(path, given[path], part_of(want, path, rank, sequence), -1, 10 * precision)
  end
  local most, seen = 0, 0
  for name, whole in pairs(golden) do
    if name:find("^" .. style .. "%.grad%.") then most = math.max(most, largest(whole)) end
  end
  for _, entry in ipairs(model:named_parameters()) do
    local name, grad = entry[1], entry[2]:grad():to "f64" * r.scale
    local want = grads[name]
    seen = seen + 1
    same("the gradient of " .. name, grad, want, 0, precision * most)
    check.equal(largest(grad:slice(0, want:size(0), grad:size(0))), 0.0, name .. "'s padding")
  end
  check.ok(seen > 0, "no gradient was compared")
end

for _, style in ipairs { "gelu", "swiglu" } do
  for _, dtype in ipairs { "f32", "f64" } do
    for _, sequence in ipairs { false, true } do
      pipelines.test(("a %s GPT over tp 2, %s, %s: layers, loss and gradients of a split by hand")
        :format(style, dtype, sequence and "sequence parallel" or "time whole"), RANKS,
        function(team) compare(team, style, dtype, sequence) end)
    end
  end
end

core.doing("")
check.done()
