-- gpt - a decoder-only transformer, GPT-2 style (learned positions, LayerNorm, GELU) or Llama style
-- (rotary positions, RMSNorm, SwiGLU, grouped queries). Plain enough to copy and change.
local rille = require "rille"
local nn = rille.nn

local Block = nn.class "Block"

function Block:init(o)
  local norm = o.style == "llama" and nn.RMSNorm or nn.LayerNorm
  self.norm1 = norm(o.d)
  self.attn = nn.Attention { o.d, o.heads, causal = true, kv_heads = o.kv_heads,
    rotary = o.style == "llama", bias = o.bias, window = o.window }
  self.norm2 = norm(o.d)
  self.mlp = nn.MLP { o.d, o.hidden, act = o.style == "llama" and "swiglu" or o.act, bias = o.bias }
  self.drop = nn.Dropout(o.dropout)
end

function Block:forward(x)
  x = x + self.drop(self.attn(self.norm1(x)))
  return x + self.drop(self.mlp(self.norm2(x)))
end

-- GPT-2's initial values (section 2.3 of its report): normal(0, 0.02), projections into the
-- residual stream smaller by sqrt(2 layers), biases 0.
local function init_weights(model, layers)
  for _, entry in ipairs(model:named_parameters()) do
    local name, p = entry[1], entry[2]
    if name:find("%.bias$") then
      p:zero_()
    elseif name:find("proj%.weight$") or name:find("down%.weight$") then
      p:normal_(0, 0.02 / math.sqrt(2 * layers))
    elseif p:ndim() == 2 then
      p:normal_(0, 0.02)
    end
  end
end

--- gpt{vocab =, T =, d =, layers =, heads =, style = "gpt2" or "llama", kv_heads =, hidden =,
--- dropout =, act =}
return function(o)
  local llama = o.style == "llama"
  local options = {
    d = o.d, heads = o.heads, kv_heads = o.kv_heads or o.heads, style = o.style or "gpt2",
    hidden = o.hidden or (llama and (8 * o.d // 3 + 63) // 64 * 64 or 4 * o.d),
    act = o.act or "gelu_tanh", dropout = o.dropout or 0, bias = not llama, window = o.window or 0,
  }
  local model = nn.Sequential {
    { "wte", nn.TokenEmbedding { o.vocab, o.d, positions = not llama and o.T or nil } },
    { "h", nn.Repeat(o.layers, function() return Block(options) end) },
    { "ln_f", (llama and nn.RMSNorm or nn.LayerNorm)(o.d) },
    { "head", nn.Linear { o.d, o.vocab, bias = false, tied = "wte.weight" } },
  }
  init_weights(model, o.layers)
  return model
end
