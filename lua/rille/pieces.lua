-- pieces - tensors of which every rank has a part, in safetensors files: what a rank writes of one,
-- and how any other part, or the whole, is put together again.
--
--     model.h.0.attn.qkv.weight#96      what begins at index 96 of the dimension that is cut
--
-- A piece is what lies together in the whole, so that no layout is needed to read it; the whole's
-- shape and the dimension stand in the metadata. What is not cut has an entry under its own name.
--
-- Invariants:
--  1. The pieces of a tensor do not overlap and leave nothing out; padding is in none of them.
--  2. Only those pieces are read of which a part has some.
local rille = require "rille"
local fail = require "rille.fail"
local tensor_parallel = require "rille.tensor_parallel"

local pieces = {}

--- What a rank of a tp group writes of a tensor, a list of {name, tensor}: of a part (cut: as in
--- rille.TpPlan) the runs that no other rank counts.
function pieces.of(name, tensor, cut, rank)
  if not cut then return { { name, tensor } } end
  local list, plain = {}, tensor:detach()
  tensor_parallel.each_run(cut, rank, function(here, there, n, is_counted)
    if is_counted then
      table.insert(list, { ("%s#%d"):format(name, there), plain:slice(cut.dim, here, here + n) })
    end
  end)
  return list
end

-- What metadata say of the tensors that are cut, checked: {name = {dim =, shape =}}.
local function check_cuts(path, cuts)
  for name, cut in pairs(cuts) do
    local good = type(cut) == "table" and type(cut.shape) == "table"
      and math.type(cut.dim) == "integer" and math.type(cut.shape[cut.dim + 1]) == "integer"
    if not good then fail("%s is damaged: it does not say how %s is cut", path, name) end
  end
end

local function describe(dtype, shape) return ("%s[%s]"):format(dtype, table.concat(shape, ", ")) end

-- Refuses pieces that are not those of one whole (inv. 1).
local function check_pieces(path, name, there)
  table.sort(there.pieces, function(a, b) return a.at < b.at end)
  local at, full, shape = 0, there.shape[there.dim + 1], { table.unpack(there.shape) }
  for _, piece in ipairs(there.pieces) do
    there.dtype = there.dtype or piece.dtype
    shape[there.dim + 1] = piece.n
    local have, want = describe(piece.dtype, piece.shape), describe(there.dtype, shape)
    if have ~= want then
      fail("%s is damaged: the piece %s is %s where %s is wanted", path, piece.name, have, want)
    end
    if piece.at ~= at then break end
    at = at + piece.n
  end
  if at == full and #there.pieces > 0 then return end
  fail("%s is damaged: %s[%s] lacks the piece that begins at index %d of dimension %d", path,
    name, table.concat(there.shape, ", "), at, there.dim)
end

--- The tensors in an open file, whole or cut: {name = {dtype =, shape = of the whole, dim = along
--- which it is cut or nil, pieces = {{name =, at =, n =}, ...}}}. cuts: {name = {dim =, shape =}}
--- of those that are cut.
function pieces.stored(path, file, cuts)
  local list = {}
  check_cuts(path, cuts)
  for name, cut in pairs(cuts) do list[name] = { shape = cut.shape, dim = cut.dim, pieces = {} } end
  for _, name in ipairs(file:names()) do
    local dtype, shape = file:describe(name)
    local whole, at = name:match("^(.*)#(%d+)$")
    local cut = whole and cuts[whole]
    if cut then
      table.insert(list[whole].pieces, { name = name, at = math.tointeger(at), dtype = dtype,
        shape = shape, n = shape[cut.dim + 1] })
    else
      list[name] = { dtype = dtype, shape = shape, pieces = { { name = name } } }
    end
  end
  for name in pairs(cuts) do check_pieces(path, name, list[name]) end
  return list
end

-- A rank's runs as {here, there, n}; all of a dimension, if the tensor is not cut.
local function runs_of(cut, rank, full)
  if not cut then return { { 0, 0, full } } end
  local list = {}
  tensor_parallel.each_run(cut, rank, function(...) table.insert(list, { ... }) end)
  return list
end

-- Where entries [there, there + n) of a dimension and those of a piece meet: from, to; or nil.
local function meet(there, n, piece)
  local from, to = math.max(there, piece.at), math.min(there + n, piece.at + piece.n)
  if from < to then return from, to end
end

--- A rank's part of a stored tensor (cut nil: the whole), padding 0. read(name) gives the values of
--- an entry.
function pieces.assemble(there, read, shape, cut, rank)
  if not there.dim and not cut then return read(there.pieces[1].name) end
  local out = rille.zeros(shape, { dtype = there.dtype })
  local dim, along = cut and cut.dim or there.dim, there.dim or cut.dim
  local runs = runs_of(cut, rank, there.shape[dim + 1])
  for _, piece in ipairs(there.pieces) do
    local value, at = nil, piece.at or 0
    local extent = { at = at, n = piece.n or there.shape[along + 1] }
    for _, run in ipairs(runs) do
      local part = out:slice(dim, run[1], run[1] + run[3])
      local from, to = run[2], run[2] + run[3]
      if dim == along then
        from, to = meet(run[2], run[3], extent)
        if from then part = part:slice(dim, from - run[2], to - run[2]) end
      else
        part = part:slice(along, at, at + extent.n)
      end
      if from then
        value = value or read(piece.name)
        local first = dim == along and at or 0
        part:copy_(value:slice(dim, from - first, to - first))
      end
    end
  end
  return out
end

return pieces
