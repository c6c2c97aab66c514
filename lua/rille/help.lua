--- help - what an op does, from the table that the bindings are made from; and what else there is.
local rille <const> = require "rille"
local expect <const> = require "rille.expect"

local M <const> = {}

local function rows()
  local list = rille.core.ops()
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

--- "sum(x, dims:list=all, keepdim:bool=false)"
local function signature(row)
  local parts = {}
  for word in row.inputs:gmatch("%S+") do parts[#parts + 1] = word end
  for word in row.args:gmatch("%S+") do parts[#parts + 1] = word end
  return ("%s(%s)"):format(row.name, table.concat(parts, ", "))
end

local function describe(row)
  local notes = {}
  if row.outputs > 1 then notes[#notes + 1] = row.outputs .. " results" end
  if not row.differentiable then notes[#notes + 1] = "no gradient" end
  if row.in_place then notes[#notes + 1] = ("in place: x:%s_()"):format(row.name) end
  local tail = #notes > 0 and "\n    " .. table.concat(notes, "; ") or ""
  return ("%s\n    %s%s"):format(signature(row), row.help, tail)
end

-- What is no row of the op table: {signature, words}.
local others <const> = {
  { "tensor(values, {dtype =, device =, requires_grad =})", "a tensor from nested tables, a "
    .. "number, a string's bytes, or a copy of a tensor; integers are i64, other numbers f32" },
  { "zeros(shape..., options)", "a tensor of zeros; ones, empty, rand (uniform in [0, 1)) and "
    .. "randn (normal) alike; options as for tensor" },
  { "full(shape, value, options)", "a tensor filled with a value" },
  { "full_like(x, value, options)", "the same with x's shape; zeros_like, ones_like, rand_like, "
    .. "randn_like alike" },
  { "randint(lo, hi, shape..., options)", "integers from lo to hi - 1" },
  { "arange(start, stop, step)", "start, start + step, ... below stop; arange(stop) begins at 0" },
  { "linspace(first, last, n)", "n numbers, evenly spaced, both ends included" },
  { "eye(n, m)", "ones on the diagonal" },
  { "dropout(x, p, part)", "x / (1 - p), or 0 with probability p; within a training step the mask "
    .. "depends on seed, module, step and sample alone; part {dim, at, full}: x is entries at, "
    .. "at + 1, ... of a dimension that is full long" },
  { "split(x, size, dim = 0)", "x:split(2): views of parts of 2 along dim, the last may be "
    .. "smaller; x:split({1, 3}, -1): of parts of 1 and 3" },
  { "cross_entropy(logits, target, options)", "the mean of -log softmax(logits)[target] over the "
    .. "targets that count; options ignore_index = -100, label_smoothing = 0, z_loss = 0, "
    .. "reduction = \"mean\" or \"sum\"" },
  { "mse(x, target)", "the mean of (x - target)^2" },
  { "to(x, what)", "x:to(\"f64\") in another dtype (see cast), x:to(\"meta\") its shape alone" },
  { "item(x)", "x:item(): the value of a tensor with one element, as a Lua number" },
  { "tolist(x)", "x:tolist(): nested tables" },
  { "detach(x)", "the same values without a graph" },
  { "clone(x)", "a copy; gradients flow through" },
  { "backward(x, gradient)", "x:backward(): the gradients of x in the leaves that want one; "
    .. "x:grad() is a leaf's" },
  { "copy_(x, source)", "writes into x; fill_, zero_, normal_(mean, deviation), uniform_(lo, hi) "
    .. "alike" },
  { "shape(x)", "x:shape(): the sizes, as several numbers; x:size(dim) one, x:ndim() how many, "
    .. "x:numel() elements, x:dtype()" },
  { "no_grad(fn, ...)", "fn(...) without a graph; or local _ <close> = rille.no_grad()" },
  { "checkpoint(fn, ...)", "fn(...), computed again in backward instead of kept" },
  { "gradcheck(fn, inputs)", "compares fn's gradients with finite differences in f64" },
  { "op{name =, forward =, backward =}", "an op of one's own" },
}

local function name_of(entry) return entry[1]:match("^[%w_]+") end

-- The name that a word may mean: a misspelling, or a part of it.
local function suggest(word, names)
  local near <const> = rille.core.nearest(word, names)
  if near then return near end
  for _, name in ipairs(names) do
    if #name > 2 and (name:find(word, 1, true) or word:find(name, 1, true)) then return name end
  end
end

--- help("softmax") prints one function, help() all of them in a line each.
---@param name? string
function M.help(name)
  expect("rille.help", "name", name, "string?")
  local list <const> = rows()
  if name == nil then
    print("ops, each rille.name(x, ...) and x:name(...)")
    for _, row in ipairs(list) do print(("  %-20s %s"):format(row.name, row.help)) end
    print("other functions")
    for _, entry in ipairs(others) do print(("  %-20s %s"):format(name_of(entry), entry[2])) end
    print('rille.help("name") says more')
    return
  end
  local names <const> = {}
  for _, row in ipairs(list) do
    if row.name == name then return print(describe(row)) end
    table.insert(names, row.name)
  end
  for _, entry in ipairs(others) do
    if name_of(entry) == name then return print(("%s\n    %s"):format(entry[1], entry[2])) end
    table.insert(names, name_of(entry))
  end
  local near <const> = suggest(name, names)
  local hint <const> = near and ("; did you mean %q?"):format(near) or ""
  print(("there is no function %q%s"):format(name, hint))
end

return M
