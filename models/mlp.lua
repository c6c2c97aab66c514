-- mlp - layers with an activation between them: mlp{2, 64, 64, 1, act = "gelu"}.
local rille = require "rille"
local nn = rille.nn

--- The numbers are widths, from the input to the output. Options: act (default "relu"), dropout.
return function(o)
  local layers = {}
  for i = 1, #o - 1 do
    local is_last = i == #o - 1
    table.insert(layers, nn.Linear { o[i], o[i + 1], act = is_last and "none" or o.act or "relu" })
    if not is_last and o.dropout then table.insert(layers, nn.Dropout(o.dropout)) end
  end
  return nn.Sequential(layers)
end
