-- layers - the layers that models are made of. Each says its formula and shapes; B batch, T time, C
-- channels.
local rille = require "rille"
local nn = require "rille.nn"
local expect = require "rille.expect"
local fail = require "rille.fail"
local none = nn.none

-- How a layer may be cut over the ranks of a tp group (rille.tensor_parallel).
local forms = { Linear = { "column", "row", "heads", "vocab", "replicate" },
  Attention = { "heads", "replicate" }, MLP = { "column", "replicate" },
  TokenEmbedding = { "vocab", "replicate" }, norm = { "heads", "replicate" },
  Dropout = { "column", "replicate" } }

local function check_form(class, form, valid)
  for _, name in ipairs(valid) do
    if form == name or form == nil then return form end
  end
  fail.usage("%s: tp must be %s, got %s%s", class, table.concat(valid, ", "),
    expect.describe(form), type(form) == "string" and rille.did_you_mean(form, valid) or "")
end

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
--- Weight and bias begin uniform in +-1/sqrt(d_in), as PyTorch's do. tp: how ranks share it:
--- "column" (d_out, the input whole), "row" (d_in, the output a sum), "heads" (d_out by `heads`
--- query heads and 2 `kv_heads`), "vocab" (d_out, padded), "replicate" (default).
local Linear = nn.class "Linear"
nn.Linear = Linear

function Linear:init(...)
  local o = nn.arguments("Linear", { ... }, { "d_in", "d_out" },
    { bias = true, act = "none", tied = none, dtype = "f32", tp = none, heads = none,
      kv_heads = none },
    { d_in = "count", d_out = "count", tied = "string?", heads = "positive?",
      kv_heads = "positive?" })
  self.d_in, self.d_out, self.act, self.act_name = o.d_in, o.d_out, act_code(o.act), o.act
  self.form = check_form("Linear", o.tp, forms.Linear)
  if self.form == "heads" then
    local n = (o.heads or 0) + 2 * (o.kv_heads or o.heads or 0)
    if n == 0 or o.d_out % n ~= 0 then
      fail.usage("Linear: tp = \"heads\" needs heads (and kv_heads): d_out = %d rows are those of "
        .. "heads + 2 kv_heads", o.d_out)
    end
    self.heads, self.kv_heads = o.heads, o.kv_heads or o.heads
  end
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

function Linear:tensor_parallel(plan)
  local form = self.form or plan.head == self and "vocab" or "replicate"
  if self.tied then
    local cut = plan.cuts[self.tied]
    form = cut and cut.form or "replicate"
  end
  rawset(self, "_tp_form", form)
  if form == "row" then
    plan:even(self, "weight", 1, "d_in")
  else
    for _, field in ipairs { "weight", "bias" } do
      if form == "column" then
        plan:even(self, field, 0, "d_out")
      elseif form == "heads" then
        local n = self.heads + 2 * self.kv_heads
        plan:heads(self, field, self.heads, self.kv_heads, self.d_out // n)
      elseif form == "vocab" then
        plan:padded(self, field, 0)
      end
    end
  end
end

function Linear:forward(x)
  local tp, form = rawget(self, "_tp"), rawget(self, "_tp_form")
  if not tp or form == "replicate" or rawget(self, "_gets_whole") then
    return rille.linear(x, self:matrix(), self.bias, self.act)
  elseif form == "row" then
    local y = tp:row(x, self:matrix(), self.bias)
    return self.act == 0 and y or rille[self.act_name](y)
  end
  local y = tp:column(x, self:matrix(), self.bias, self.act)
  local stays_cut = form ~= "vocab"
  if rawget(self, "_is_head") then stays_cut = tp.keeps_cut end -- outside a pass outputs are whole
  if not stays_cut then y = tp:whole_features(y, self.d_out) end
  tp:note_last(y, stays_cut and self or nil)
  return y
end

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
    { positions = none, dtype = "f32", std = 0.02, tp = "vocab" },
    { vocab = "count", d = "count", positions = "positive?" })
  self.form = check_form("TokenEmbedding", o.tp, forms.TokenEmbedding)
  self.vocab, self.d, self.positions = o.vocab, o.d, o.positions
  self.weight = nn.Parameter({ o.vocab, o.d }, { dtype = o.dtype })
  self.weight:normal_(0, o.std)
  if o.positions then
    self.position = nn.Parameter({ o.positions, o.d }, { dtype = o.dtype })
    self.position:normal_(0, o.std)
  end
end

function TokenEmbedding:tensor_parallel(plan)
  if self.form == "vocab" then plan:padded(self, "weight", 0) end
end

-- Rows of the weight for this rank's part of time, summed over the parts of the vocabulary.
local function look_up(self, tp, ids)
  if not tp then return rille.embedding(self.weight, ids) end
  if self.form == "replicate" then return rille.embedding(self.weight, tp:mine(ids)) end
  local rows = self.weight:size(0)
  return tp:leave(rille.embedding(self.weight, ids, { first = tp.rank * rows, vocab = self.vocab }))
end

function TokenEmbedding:forward(ids)
  local tp = rawget(self, "_tp")
  local x = look_up(self, tp, ids)
  if not self.position then return x end
  local T = ids:size(-1)
  if T > self.positions then
    fail("a sequence of %d tokens is longer than the %d positions of this embedding", T,
      self.positions)
  end
  if tp then return x + tp:mine(self.position:slice(0, 0, T), 0) end
  return x + self.position:slice(0, 0, T)
end

function TokenEmbedding:extra() return ("(%d x %d)"):format(self.vocab, self.d) end

-- A norm of heads that ranks share out: each rank has the gradient of its own heads.
local function sum_over_heads(self, plan)
  if self.form ~= "heads" then return end
  plan:sums(self, "weight")
  plan:sums(self, "bias")
end

--- (x - mean) / sqrt(var + eps) * weight + bias over the last dimension. tp = "heads": a norm of
--- heads between a "heads" and a "row" Linear.
local LayerNorm = nn.class "LayerNorm"
nn.LayerNorm = LayerNorm

function LayerNorm:init(...)
  local o = nn.arguments("LayerNorm", { ... }, { "d" },
    { eps = 1e-5, bias = true, dtype = "f32", tp = none }, { d = "count" })
  self.eps, self.form = o.eps, check_form("LayerNorm", o.tp, forms.norm)
  self.weight = nn.Parameter({ o.d }, { dtype = o.dtype })
  self.weight:fill_(1)
  if o.bias then self.bias = nn.Parameter({ o.d }, { dtype = o.dtype }) end
end

LayerNorm.tensor_parallel = sum_over_heads

function LayerNorm:forward(x) return rille.layer_norm(x, self.weight, self.bias, self.eps) end

--- x / sqrt(mean x^2 + eps) * weight over the last dimension.
local RMSNorm = nn.class "RMSNorm"
nn.RMSNorm = RMSNorm

function RMSNorm:init(...)
  local o = nn.arguments("RMSNorm", { ... }, { "d" }, { eps = 1e-6, dtype = "f32", tp = none },
    { d = "count" })
  self.eps, self.form = o.eps, check_form("RMSNorm", o.tp, forms.norm)
  self.weight = nn.Parameter({ o.d }, { dtype = o.dtype })
  self.weight:fill_(1)
end

RMSNorm.tensor_parallel = sum_over_heads

function RMSNorm:forward(x) return rille.rms_norm(x, self.weight, self.eps) end

--- Multi-head attention with one projection for q, k and v. Options: causal, kv_heads (grouped
--- queries), window (the last keys only), rotary (true, or theta), bias, tp ("heads", the default:
--- ranks share the heads out; or "replicate"). x[B, T, d] -> [B, T, d].
local Attention = nn.class "Attention"
nn.Attention = Attention

function Attention:init(...)
  local o = nn.arguments("Attention", { ... }, { "d", "heads" },
    { causal = false, kv_heads = none, window = 0, rotary = false, bias = true, dtype = "f32",
      tp = "heads" },
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
  self.form = check_form("Attention", o.tp, forms.Attention)
  local is_cut = self.form == "heads"
  self.time = not is_cut and "whole" or nil
  self.qkv = Linear { o.d, (o.heads + 2 * kv_heads) * self.size, bias = o.bias, dtype = o.dtype,
    tp = self.form, heads = is_cut and o.heads or nil, kv_heads = is_cut and kv_heads or nil }
  self.proj = Linear { o.d, o.d, bias = o.bias, dtype = o.dtype,
    tp = is_cut and "row" or "replicate" }
end

-- Attention over the heads that this rank has.
local function attend_now(self, x, mask, heads, kv_heads)
  local qkv = self.qkv(x)
  if not self.theta then
    return self.proj(rille.attention_packed(qkv, mask, {
      heads = heads, kv_heads = kv_heads, causal = self.causal, window = self.window,
    }))
  end
  local B, T = qkv:shape()
  local H, G, D = heads, kv_heads, self.size
  local q = qkv:slice(2, 0, H * D):view(B, T, H, D)
  local k = qkv:slice(2, H * D, (H + G) * D):view(B, T, G, D)
  local v = qkv:slice(2, (H + G) * D, (H + 2 * G) * D):view(B, T, G, D)
  q = rille.rope(q, nil, { theta = self.theta })
  k = rille.rope(k, nil, { theta = self.theta })
  local y = rille.attention(q, k, v, mask, { causal = self.causal, window = self.window })
  return self.proj(y:view(B, T, H * D))
end

local function attend(self, ...)
  if not rawget(self, "_recomputes") then return attend_now(self, ...) end
  return rille.checkpoint(attend_now, self, ...)
end

function Attention:forward(x, mask)
  local tp, heads, kv_heads = rawget(self, "_tp"), self.heads, self.kv_heads
  if not tp or self.form == "replicate" then return attend(self, x, mask, heads, kv_heads) end
  if mask and mask:ndim() >= 3 and mask:size(-3) == heads and heads > 1 then
    mask = mask:slice(-3, tp:range(heads, "heads"))
  end
  return attend(self, x, mask, heads // tp.size, math.max(kv_heads // tp.size, 1))
end

--- d -> hidden -> d with an activation between; act = "swiglu" is silu(x Wg) * (x Wu)
--- (arXiv:2002.05202). tp: "column" (default: ranks share the hidden ones out) or "replicate".
local MLP = nn.class "MLP"
nn.MLP = MLP

function MLP:init(...)
  local o = nn.arguments("MLP", { ... }, { "d", "hidden" },
    { act = "gelu_tanh", bias = true, dtype = "f32", tp = "column" },
    { d = "count", hidden = "count" })
  self.gated = o.act == "swiglu"
  self.form = check_form("MLP", o.tp, forms.MLP)
  local is_cut = self.form == "column"
  local function linear(d_in, d_out, form, act)
    return Linear { d_in, d_out, bias = o.bias, dtype = o.dtype, act = act or "none",
      tp = is_cut and form or "replicate" }
  end
  if self.gated then
    self.gate = linear(o.d, o.hidden, "column", "silu")
    self.up = linear(o.d, o.hidden, "column")
  else
    self.up = linear(o.d, o.hidden, "column", o.act)
  end
  self.down = linear(o.hidden, o.d, "row")
end

-- Gate and up read one input: its gradients are summed over ranks once, for both.
function MLP:tensor_parallel()
  if not self.gated then return end
  rawset(self.gate, "_gets_whole", true)
  rawset(self.up, "_gets_whole", true)
end

function MLP:forward(x)
  local tp = rawget(self, "_tp")
  if not self.gated then return self.down(self.up(x)) end
  if tp and self.form == "column" then x = tp:enter(x) end
  return self.down(self.gate(x) * self.up(x))
end

--- x / (1 - p), or 0 with probability p, in training; the mask depends on seed, step and sample
--- alone. tp = "column": its input's features are cut, as between a "column" and a "row" Linear.
local Dropout = nn.class "Dropout"
nn.Dropout = Dropout

function Dropout:init(...)
  local o = nn.arguments("Dropout", { ... }, { "p" }, { tp = none })
  local p = o.p
  self.form = check_form("Dropout", o.tp, forms.Dropout)
  if type(p) ~= "number" or not (p >= 0 and p < 1) then
    fail.usage("Dropout: p must be in [0, 1), not %s", expect.describe(p))
  end
  self.p = p
end

function Dropout:forward(x)
  if not self.training or self.p == 0 then return x end
  local tp = rawget(self, "_tp")
  return rille.dropout(x, self.p, tp and tp:place(x, self.form == "column") or nil)
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
