"""Text recognition in images by RapidOCR and PP-OCRv6, whose weights are in the package: nothing is fetched."""

from cog import BaseModel, BaseRunner, Input, Path
from rapidocr import RapidOCR


class Line(BaseModel):
    text: str
    score: float
    box: list[list[float]]  # the corners, in pixels, clockwise from the top left


class Output(BaseModel):
    text: str
    lines: list[Line]


class Runner(BaseRunner):
    def setup(self) -> None:
        self.engine = RapidOCR(params={"Global.log_level": "warning"})

    def run(
        self,
        image: Path = Input(description="Picture with text"),
        min_score: float = Input(description="Leave out lines that are less certain", default=0.5, ge=0, le=1),
    ) -> Output:
        found = self.engine(str(image))
        lines = [
            Line(text=text, score=round(float(score), 4), box=[[float(x), float(y)] for x, y in box])
            for text, score, box in zip(found.txts or (), found.scores or (), found.boxes if found.txts else ())
            if score >= min_score
        ]
        self.record_metric("lines", len(lines))
        return Output(text="\n".join(line.text for line in lines), lines=lines)
