-- export - the whole model as one plain safetensors file, from ranks that each hold a part of it.
--
--     header: names, dtypes, whole shapes      rank 0 knows them before anybody sends
--     for each run of each parameter: its holder --broadcast--> rank 0 --> its place in the file
--
-- Invariants:
--  1. A rank has one run of one parameter beside what it holds, never more.
--  2. Ranks of one replica do all of it; those of others wait for the end.
--  3. What fails on rank 0 is told at the end, so that no rank waits for another in between: no
--     file is there then.
local rille = require "rille"
local core = rille.core
local checkpoint = require "rille.checkpoint"
local expect = require "rille.expect"
local tensor_parallel = require "rille.tensor_parallel"

local export = {}

-- What the file has, in the order of state_dict(): {name, dtype, shape}; the same on all ranks.
local function entries_of(trainer)
  local list = {}
  for _, p in ipairs(trainer.layout.params) do
    table.insert(list, { p.name, p.tensor:dtype(), p.shape })
  end
  for _, entry in ipairs(trainer.model:named_buffers()) do
    table.insert(list, { entry[1], entry[2]:dtype(), { entry[2]:shape() } })
  end
  return list
end

-- Which rank of the replica is at a place of the mesh, and which holds each buffer.
local function find_holders(trainer, comm)
  local l, PLACE <const> = trainer.layout, "<i8i8s4"
  local names, at, buffers = {}, {}, {}
  for i, entry in ipairs(trainer.pipeline:buffers()) do names[i] = entry[1] end
  local tp_rank = l.tp and l.tp.rank or 0
  for rank, text in ipairs(comm:all_gather(PLACE:pack(l.rank, tp_rank,
    table.concat(names, "\n")))) do
    local pp, tp, list = PLACE:unpack(text)
    at[pp] = at[pp] or {}
    at[pp][tp] = rank - 1
    for name in list:gmatch("[^\n]+") do buffers[name] = buffers[name] or rank - 1 end
  end
  return at, buffers
end

-- The first thing that failed on rank 0, in writing: the others go on sending.
local function attempt(state, ...)
  if state.words then return end
  local ok, words = pcall(state.writer.write, state.writer, ...)
  if not ok then state.words = tostring(words) end
end

-- A piece of entry i from its holder to the file: `shape` is the piece's; make() gives its values
-- there; dim, at, full: where it lies in the whole, as for the writer.
local function pass(state, i, holder, dtype, shape, make, dim, at, full)
  local comm = state.comm
  local mine = comm:rank() == holder
  local piece = mine and make():detach():contiguous() or nil
  if holder > 0 then -- else it is where it goes to
    piece = piece or rille.zeros(shape, { dtype = dtype })
    comm:broadcast(piece, holder)
  end
  if state.writer then attempt(state, i, piece, dim, at, full) end
  if piece then core.release(piece) end
end

local function pass_parameter(state, i, p, at)
  if not p.cut then
    pass(state, i, at[p.owner][0], p.tensor:dtype(), p.shape, function() return p.tensor end)
    return
  end
  local cut = p.cut
  for tp = 0, #at[p.owner] do
    tensor_parallel.each_run(cut, tp, function(here, there, n, is_counted)
      if not is_counted then return end
      local shape = { table.unpack(p.shape) }
      shape[cut.dim + 1] = n
      pass(state, i, at[p.owner][tp], p.tensor:dtype(), shape, function()
        return p.tensor:detach():slice(cut.dim, here, here + n)
      end, cut.dim, there, cut.full)
    end)
  end
end

-- All of the model, in the order of the entries (inv. 2).
local function pass_all(trainer, state)
  local at, holders = find_holders(trainer, state.comm)
  local mine, params = {}, trainer.layout.params
  for _, entry in ipairs(trainer.pipeline:buffers()) do mine[entry[1]] = entry[2] end
  for i, p in ipairs(params) do pass_parameter(state, i, p, at) end
  for k, entry in ipairs(trainer.model:named_buffers()) do
    local name, buffer = entry[1], entry[2]
    pass(state, #params + k, holders[name], buffer:dtype(), { buffer:shape() },
      function() return mine[name] end)
  end
end

--- Writes parameters and buffers, whole and without padding, to one safetensors file, under the
--- names of model:state_dict(). Every rank calls it; rank 0 writes. What fails there fails on all
--- ranks, and leaves no new file.
function export.write(trainer, path)
  expect("Trainer:export", "path", path, "path")
  local all = trainer.layout.mesh:all()
  local state = { comm = trainer.pipeline.model_comm }
  local words = checkpoint.together(all, function()
    if all:rank() == 0 then state.writer = core.safetensors_writer(path, entries_of(trainer)) end
  end)
  if words then error(words, 0) end
  if trainer.layout.mesh:at("dp") == 0 then
    rille.no_grad(function() pass_all(trainer, state) end)
  end
  words = checkpoint.together(all, function()
    if not state.writer then return end
    local _ <close> = state.writer
    if state.words then error(state.words, 0) end
    state.writer:commit()
  end)
  if words then error(words, 0) end
end

return export
