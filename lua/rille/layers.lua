-- layers - the layers that models are made of. Each says its formula and shapes; B batch, T time, C
-- channels.
local rille = require "rille"
local nn = require "rille.nn"
local expect = require "rille.expect"
local fail = require "rille.fail"
local none = nn.none

local activations = { none = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 }

local function act_code(name)
  local code = activations[name]
  if not code then
    local names = {}
    for known in pairs(activations) do table.insert(names, known) end
    table.sort(names)
    fail.usage("there is no activation %q: %s%s", tostring(name), table.concat(names, ", "),
      rille.did_you_mean(tostring(name), names))
  end
  return code
end

--- y[..., d_out] = act(x[..., d_in] weight[d_out, d_in]' + bias). tied: the path of another weight
--- to use.
--- Weight and bias begin uniform in +-1/sqrt(d_in), as PyTorch's do.
local Linear = nn.class "Linear"
nn.Linear = Linear

function Linear:init(...)
  local o = nn.arguments("Linear", { ... }, { "d_in", "d_out" },
    { bias = true, act = "none", tied = none, dtype = "f32" },
    { d_in = "count", d_out = "count", tied = "string?" })
  self.d_in, self.d_out, self.act = o.d_in, o.d_out, act_code(o.act)
  local bound = 1 / math.sqrt(math.max(o.d_in, 1))
  if o.tied then
    self.tied = o.tied
  else
    self.weight = nn.Parameter({ o.d_out, o.d_in }, { dtype = o.dtype })
    self.weight:uniform_(-bound, bound)
  end
  if o.bias then
    self.bias = nn.Parameter({ o.d_out }, { dtype = o.dtype })
    self.bias:uniform_(-bound, bound)
  end
end

--- The weight, its own or the tied one.
function Linear:matrix()
  if not self.tied then return self.weight end
  if not rawget(self, "_matrix") then
    rawset(self, "_matrix", self:shared_parameters()[1][2])
  end
  return self._matrix
end

function Linear:forward(x) return rille.linear(x, self:matrix(), self.bias, self.act) end

function Linear:extra()
  local tied = self.tied and ", tied to " .. self.tied or ""
  return ("(%d -> %d%s)"):format(self.d_in, self.d_out, tied)
end

--- ids[B, T] i64 -> weight[ids] (+ position[0 .. T-1] if positions = maximum T) : [B, T, C]. Begins
--- normal(0, 0.02).
local TokenEmbedding = nn.class "TokenEmbedding"
nn.TokenEmbedding = TokenEmbedding

function TokenEmbedding:init(...)
  local o = nn.arguments("TokenEmbedding", { ... }, { "vocab", "d" },
    { positions = none, dtype = "f32", std = 0.02 },
    { vocab = "count", d = "count", positions = "positive?" })
  self.vocab, self.d, self.positions = o.vocab, o.d, o.positions
  self.weight = nn.Parameter({ o.vocab, o.d }, { dtype = o.dtype })
  self.weight:normal_(0, o.std)
  if o.positions then
    self.position = nn.Parameter({ o.positions, o.d }, { dtype = o.dtype })
    self.position:normal_(0, o.std)
  end
end

function TokenEmbedding:forward(ids)
  local x = rille.embedding(self.weight, ids)
  if not self.position then return x end
  local T = ids:size(-1)
  if T > self.positions then
    fail("a sequence of %d tokens is longer than the %d positions of this embedding", T,
      self.positions)
  end
  return x + self.position:slice(0, 0, T)
end

function TokenEmbedding:extra() return ("(%d x %d)"):format(self.vocab, self.d) end

--- (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.
local LayerNorm = nn.class "LayerNorm"
nn.LayerNorm = LayerNorm

function LayerNorm:init(...)
  local o = nn.arguments("LayerNorm", { ... }, { "d" },
    { eps = 1e-5, bias = true, dtype = "f32" }, { d = "count" })
  self.eps = o.eps
  self.weight = nn.Parameter({ o.d }, { dtype = o.dtype })
  self.weight:fill_(1)
  if o.bias then self.bias = nn.Parameter({ o.d }, { dtype = o.dtype }) end
end

function LayerNorm:forward(x) return rille.layer_norm(x, self.weight, self.bias, self.eps) end

--- x / sqrt(mean x^2 + eps) * weight over the last dimension.
local RMSNorm = nn.class "RMSNorm"
nn.RMSNorm = RMSNorm

function RMSNorm:init(...)
  local o = nn.arguments("RMSNorm", { ... }, { "d" }, { eps = 1e-6, dtype = "f32" },
    { d = "count" })
  self.eps = o.eps
  self.weight = nn.Parameter({ o.d }, { dtype = o.dtype })
  self.weight:fill_(1)
end

function RMSNorm:forward(x) return rille.rms_norm(x, self.weight, self.eps) end

--- Multi-head attention with one projection for q, k and v. Options: causal, kv_heads (grouped
--- queries), window (the last keys only), rotary (true, or theta), bias. x[B, T, d] -> [B, T, d].
local Attention = nn.class "Attention"
nn.Attention = Attention

function Attention:init(...)
  local o = nn.arguments("Attention", { ... }, { "d", "heads" },
    { causal = false, kv_heads = none, window = 0, rotary = false, bias = true, dtype = "f32" },
    { d = "count", heads = "positive", kv_heads = "positive?", window = "count",
      rotary = "boolean|number" })
  local kv_heads = o.kv_heads or o.heads
  if o.d % o.heads ~= 0 then
    fail.usage("Attention: d = %d does not divide into %d heads", o.d, o.heads)
  end
  if o.heads % kv_heads ~= 0 then
    fail.usage("Attention: %d heads cannot share kv_heads = %d", o.heads, kv_heads)
  end
  self.heads, self.kv_heads, self.size = o.heads, kv_heads, o.d // o.heads
  self.causal, self.window = o.causal, o.window
  self.theta = o.rotary == true and 10000 or o.rotary
  self.qkv = Linear { o.d, (o.heads + 2 * kv_heads) * self.size, bias = o.bias, dtype = o.dtype }
  self.proj = Linear { o.d, o.d, bias = o.bias, dtype = o.dtype }
end

function Attention:forward(x, mask)
  local qkv = self.qkv(x)
  if not self.theta then
    return self.proj(rille.attention_packed(qkv, mask, {
      heads = self.heads, kv_heads = self.kv_heads, causal = self.causal, window = self.window,
    }))
  end
  local B, T = qkv:shape()
  local H, G, D = self.heads, self.kv_heads, self.size
  local q = qkv:slice(2, 0, H * D):view(B, T, H, D)
  local k = qkv:slice(2, H * D, (H + G) * D):view(B, T, G, D)
  local v = qkv:slice(2, (H + G) * D, (H + 2 * G) * D):view(B, T, G, D)
  q = rille.rope(q, nil, { theta = self.theta })
  k = rille.rope(k, nil, { theta = self.theta })
  local y = rille.attention(q, k, v, mask, { causal = self.causal, window = self.window })
  return self.proj(y:view(B, T, H * D))
end

--- d -> hidden -> d with an activation between; act = "swiglu" is silu(x Wg) * (x Wu)
--- (arXiv:2002.05202).
local MLP = nn.class "MLP"
nn.MLP = MLP

function MLP:init(...)
  local o = nn.arguments("MLP", { ... }, { "d", "hidden" },
    { act = "gelu_tanh", bias = true, dtype = "f32" }, { d = "count", hidden = "count" })
  self.gated = o.act == "swiglu"
  local options = { bias = o.bias, dtype = o.dtype }
  local function linear(d_in, d_out, act)
    return Linear { d_in, d_out, bias = options.bias, dtype = options.dtype, act = act or "none" }
  end
  if self.gated then
    self.gate = linear(o.d, o.hidden, "silu")
    self.up = linear(o.d, o.hidden)
  else
    self.up = linear(o.d, o.hidden, o.act)
  end
  self.down = linear(o.hidden, o.d)
end

function MLP:forward(x)
  if self.gated then return self.down(self.gate(x) * self.up(x)) end
  return self.down(self.up(x))
end

--- x / (1 - p), or 0 with probability p, in training; the mask depends on seed, step and sample
--- alone.
local Dropout = nn.class "Dropout"
nn.Dropout = Dropout

function Dropout:init(...)
  local p = nn.arguments("Dropout", { ... }, { "p" }, {}).p
  if type(p) ~= "number" or not (p >= 0 and p < 1) then
    fail.usage("Dropout: p must be in [0, 1), not %s", expect.describe(p))
  end
  self.p = p
end

function Dropout:forward(x)
  if not self.training or self.p == 0 then return x end
  return rille.dropout(x, self.p)
end

function Dropout:extra() return ("(%g)"):format(self.p) end

--- An activation as a module: nn.Activation "gelu" for use in Sequential.
local Activation = nn.class "Activation"
nn.Activation = Activation

function Activation:init(...)
  self.name = nn.arguments("Activation", { ... }, { "name" }, {}, { name = "string" }).name
  act_code(self.name)
end

function Activation:forward(x) return self.name == "none" and x or rille[self.name](x) end

for _, name in ipairs { "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid" } do
  nn[name] = rille[name]
end
