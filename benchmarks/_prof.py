import cProfile,pstats,sys,time,torch
from pytest_aisp.engine import Engine
from pytest_aisp.messages import Task
root=sys.argv[1]
def go(page,func,variants,size):
    e=Engine()
    for v in variants:
        base=dict(page=f"{root}/suites/ch01/{page}.py",root=root,module=f"suites.ch01.{page}",function=func,variant=v,size=size,device="cuda",rule={})
        t0=time.time(); p=cProfile.Profile(); p.enable()
        e.check(Task(kind="check",**base)); t1=time.time()
        r=e.time(Task(kind="time",**base)); t2=time.time(); p.disable()
        print("=====",page,v,"check %.2f time %.2f"%(t1-t0,t2-t1), r["details"], flush=True)
        if v==variants[-1]:
            pstats.Stats(p).sort_stats("tottime").print_stats(12)
            pstats.Stats(p).sort_stats("cumulative").print_stats(28)
go("batched_gemm_test","test_batched_gemm",["batched"],{"count":40,"n":256})
go("autocast_test","test_autocast",["tf32","bf16"],{"rows":4096,"width":4096})
go("double_buffering_test","test_double_buffering",["double_buffered"],{"count":16,"n":2048})
go("h2d_test","test_h2d",["pinned","asynchronous"],{"n":1<<24})
